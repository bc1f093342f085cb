// What the two directions of attention share: segments, strided heads, and keys and values in panels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "common.h"
#include "heads.h"
#include "simd.h"
#include "tiles.h"

namespace attention {

struct Shape {
    int64_t heads, kv_heads, dim;
    float scale;
    int64_t group() const { return heads / kv_heads; }
};

using heads::Heads;

// The keys of a segment as queries see them, its own or those of a segment that continues it.
struct View {
    int64_t segment, keys;
    bool causal;
    // How many keys, from the first on, query `i` sees.
    int64_t seen(int64_t i) const { return causal ? std::min(i + 1, keys) : keys; }
};

struct Segment {
    int64_t first_query, queries, first_key, keys;
    // Of the segments that it continues, from the root on, and of itself.
    std::vector<View> views;
};

// values: `count` x (first query, queries, first key, keys, causal, parent), parents before the segments that continue
// them and trees one after the other.
inline std::vector<Segment> read_segments(int64_t count, const int64_t* values) {
    std::vector<Segment> segments;
    segments.reserve(count);
    for (const int64_t* v = values; v < values + 6 * count; v += 6) {
        Segment segment{v[0], v[1], v[2], v[3], {}};
        if (v[5] >= 0) {
            segment.views = segments[v[5]].views;
            segment.views.back().causal = false;
        }
        segment.views.push_back({(int64_t)segments.size(), segment.keys, v[4] != 0});
        segments.push_back(std::move(segment));
    }
    return segments;
}

// Rows [first_row, first_row + rows) of a segment against keys [first_key, first_key + keys) of one that it sees.
struct Block {
    Block(const View& view, int64_t first_row, int64_t rows, int64_t first_key, int64_t keys)
        : rows(rows), first_key(first_key), keys(keys), segment_keys(view.keys), view_(view), first_row_(first_row) {}

    // Of the block's keys, how many row `row` of the block sees; may be negative.
    int64_t seen(int64_t row) const { return std::min(view_.seen(first_row_ + row) - first_key, keys); }

    int64_t first_row_that_sees(int64_t key) const {
        return view_.causal ? std::max<int64_t>(first_key + key - first_row_, 0) : 0;
    }

    int64_t rows, first_key, keys, segment_keys;

  private:
    const View& view_;
    int64_t first_row_;
};

// Rows as floats one behind the other, `ld` apart and filled up with zeros: rows far apart fall into the same few cache
// sets, and every tile reads them again.
template <class T>
void gather_rows(const T* data, int64_t ld_data, int64_t rows, int64_t columns, float* to, int64_t ld) {
    simd::widen_rows(data, ld_data, rows, columns, to, ld);
    for (int64_t row = 0; row < rows && columns < ld; ++row)
        std::fill(to + row * ld + columns, to + (row + 1) * ld, 0.0f);
}

// Asks for rows that are needed after the present block: they are far apart, so no hardware foresees them.
template <class T>
void prefetch_rows(const T* data, int64_t ld, int64_t rows, int64_t columns) {
    constexpr int64_t LINE = 64 / sizeof(T);
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t column = 0; column < columns; column += LINE) __builtin_prefetch(data + row * ld + column, 0, 2);
}

template <class T>
float dot(const float* a, const T* b, int64_t size) {
    simd::Float sums[4] = {};
    simd::for_each(size, [&](auto which, int64_t offset, int64_t count) {
        sums[which] += simd::load_up_to(a + offset, count) * simd::load_up_to(b + offset, count);
    });
    return simd::sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Keys and values of every segment and key/value head, in fp32. Forward needs K^T and V, backward K^T, V^T and K.
class Packed {
  public:
    template <class T>
    Packed(int threads, const std::vector<Segment>& segments, const Shape& shape, const Heads<const T>& k,
           const Heads<const T>& v, bool backward)
        : kv_heads_(shape.kv_heads), backward_(backward) {
        int64_t floats = 0;
        for (const Segment& segment : segments) {
            starts_.push_back(floats);
            by_key_.push_back(tiles::padded(segment.keys) * shape.dim);
            by_dim_.push_back(tiles::padded(shape.dim) * segment.keys);
            floats += shape.kv_heads * size((int64_t)by_key_.size() - 1);
        }
        memory_.reset(new float[(size_t)floats + 16]);
        data_ = (float*)(((uintptr_t)memory_.get() + 63) & ~(uintptr_t)63);
        common::parallel_for(threads, (int64_t)segments.size() * shape.kv_heads, [&](int64_t item) {
            const int64_t i = item / kv_heads_, head = item % kv_heads_;
            const Segment& segment = segments[i];
            const T *keys_from = k.at(segment.first_key, head), *values_from = v.at(segment.first_key, head);
            tiles::pack_transposed(keys_from, k.token, shape.dim, segment.keys, at(i, head));
            float* values_to = at(i, head) + by_key_[i];
            if (!backward_) {
                tiles::pack(values_from, v.token, segment.keys, shape.dim, values_to);
                return;
            }
            tiles::pack_transposed(values_from, v.token, shape.dim, segment.keys, values_to);
            tiles::pack(keys_from, k.token, segment.keys, shape.dim, values_to + by_key_[i]);
        });
    }

    const float* keys_transposed(int64_t segment, int64_t head) const { return at(segment, head); }
    // V in forward, V^T in backward
    const float* values(int64_t segment, int64_t head) const { return at(segment, head) + by_key_[segment]; }
    // backward only
    const float* keys(int64_t segment, int64_t head) const { return at(segment, head) + 2 * by_key_[segment]; }

  private:
    int64_t size(int64_t segment) const {
        return backward_ ? 2 * by_key_[segment] + by_dim_[segment] : by_key_[segment] + by_dim_[segment];
    }
    float* at(int64_t segment, int64_t head) const { return data_ + starts_[segment] + head * size(segment); }

    int64_t kv_heads_;
    bool backward_;
    std::vector<int64_t> starts_, by_key_, by_dim_;
    std::unique_ptr<float[]> memory_;
    float* data_;
};

template <class T>
void store_row(const float* from, int64_t size, T* to) {
    simd::for_each(size, [=](auto, int64_t d, int64_t count) {
        simd::store_up_to(to + d, simd::load_up_to(from + d, count), count);
    });
}

// What backward reads and writes of each query head.
template <class T>
struct BackwardHeads {
    Heads<const T> dout, q, out;
    const float* lse;
    Heads<T> dq;
};

// Neighbouring segments of a tree whose part of dk and dv, for a query head, is one sum. Its rows are those of the keys
// that they see: the segments that the first one continues, and their own.
struct Share {
    struct Place {
        int64_t segment, row;
    };
    int64_t tree, first, last, rows;
    std::vector<Place> places;
    // of a segment among its places
    int64_t row_of(int64_t segment) const {
        return std::find_if(places.begin(), places.end(), [=](const Place& p) { return p.segment == segment; })->row;
    }
};

// The shares of each tree: so many that a tree of many branches occupies all threads, so few that their sums cost
// little. Which segments make a share depends on their lengths alone.
class Shares {
  public:
    static constexpr int64_t QUERIES = 256;  // of a share at least, unless it is a tree's last one

    // Keys of segment `i` take rows_of(i) rows.
    template <class RowsOf>
    Shares(const std::vector<Segment>& all, const RowsOf& rows_of) {
        int64_t queries = 0;
        for (int64_t i = 0; i < (int64_t)all.size(); ++i) {
            const bool root = all[i].views.size() == 1;
            if (root) trees_.push_back({(int64_t)shares_.size(), 0, 0});
            if (root || queries >= QUERIES) {
                shares_.push_back({(int64_t)trees_.size() - 1, i, i, 0, {}});
                for (const View& view : all[i].views)
                    if (view.segment < i) place(shares_.back(), view.segment, rows_of(view.segment));
                queries = 0;
            }
            place(shares_.back(), i, rows_of(i));
            shares_.back().last = i + 1;
            queries += all[i].queries;
            tree_rows_.push_back(root ? 0 : tree_rows_.back() + rows_of(i - 1));
            trees_.back().rows = tree_rows_.back() + rows_of(i);
            trees_.back().end = (int64_t)shares_.size();
        }
        // the first one holds the tree's sum
        for (const Tree& tree : trees_) shares_[tree.first].rows = tree.rows;
    }

    struct Tree {
        int64_t first, rows, end;  // shares [first, end)
    };
    const std::vector<Tree>& trees() const { return trees_; }
    const std::vector<Share>& all() const { return shares_; }
    // of the keys of a segment, among those of its tree
    int64_t tree_row(int64_t segment) const { return tree_rows_[segment]; }

  private:
    static void place(Share& share, int64_t segment, int64_t rows) {
        share.places.push_back({segment, share.rows});
        share.rows += rows;
    }

    std::vector<Tree> trees_;
    std::vector<Share> shares_;
    std::vector<int64_t> tree_rows_;
};

// dk and dv of a group of query heads: each share of each head in fp32 by `head_into(share, head, dk, dv)`, which adds
// to [share.rows, ld] zeros, then their sum in order, whichever thread computed them, stored once. Keys of segment `i`
// take rows_of(i) rows.
template <class T, class RowsOf, class HeadInto>
void sum_groups(int threads, const std::vector<Segment>& all, const Shape& shape, int64_t ld, const RowsOf& rows_of,
                const HeadInto& head_into, const Heads<T>& to_dk, const Heads<T>& to_dv) {
    const int64_t group = shape.group();
    const Shares shares(all, rows_of);
    const auto& trees = shares.trees();
    const auto fill = [&](const Share& share, int64_t head, float* rows) {
        const int64_t floats = share.rows * ld;
        std::fill(rows, rows + 2 * floats, 0.0f);
        head_into(share, head, rows, rows + floats);
    };
    const auto add = [&](const Share& share, const float* rows, float* total) {
        const int64_t total_floats = trees[share.tree].rows * ld, floats = share.rows * ld;
        for (const Share::Place& place : share.places) {
            const float* from = rows + place.row * ld;
            float* to = total + shares.tree_row(place.segment) * ld;
            for (int64_t j = 0; j < rows_of(place.segment) * ld; ++j) to[j] += from[j];
            for (int64_t j = 0; j < rows_of(place.segment) * ld; ++j) to[total_floats + j] += from[floats + j];
        }
    };
    const auto finish = [&](const Shares::Tree& tree, int64_t kv_head, const float* total) {
        const int64_t last = shares.all()[tree.end - 1].last;
        for (int64_t i = shares.all()[tree.first].first; i < last; ++i)
            for (int64_t key = 0; key < all[i].keys; ++key) {
                const int64_t row = shares.tree_row(i) + key;
                store_row(total + row * ld, shape.dim, to_dk.at(all[i].first_key + key, kv_head));
                store_row(total + (tree.rows + row) * ld, shape.dim, to_dv.at(all[i].first_key + key, kv_head));
            }
    };
    const int64_t num_trees = (int64_t)trees.size(), num_shares = (int64_t)shares.all().size();
    if (group * num_shares == num_trees || num_trees * shape.kv_heads >= 2 * (int64_t)threads) {
        common::parallel_for(threads, num_trees * shape.kv_heads, [&](int64_t item) {
            const Shares::Tree& tree = trees[item / shape.kv_heads];
            const int64_t kv_head = item % shape.kv_heads, floats = tree.rows * ld;
            float* total = common::scratch<3>(4 * floats);
            for (int64_t member = 0; member < group; ++member)
                for (int64_t i = tree.first; i < tree.end; ++i) {
                    const bool is_total = member == 0 && i == tree.first;
                    float* rows = is_total ? total : total + 2 * floats;
                    fill(shares.all()[i], kv_head * group + member, rows);
                    if (!is_total) add(shares.all()[i], rows, total);
                }
            finish(tree, kv_head, total);
        });
        return;
    }
    // few pairs of tree and key/value head: one share of a query head a task, and a second pass for the sums
    std::vector<int64_t> starts{0};
    for (const Share& share : shares.all()) starts.push_back(starts.back() + 2 * share.rows * ld);
    const std::unique_ptr<float[]> memory(new float[(size_t)(shape.heads * starts.back())]);
    const auto at = [&](int64_t share, int64_t head) { return memory.get() + head * starts.back() + starts[share]; };
    common::parallel_for(threads, num_shares * shape.heads, [&](int64_t item) {
        const int64_t share = item / shape.heads, head = item % shape.heads;
        fill(shares.all()[share], head, at(share, head));
    });
    common::parallel_for(threads, num_trees * shape.kv_heads, [&](int64_t item) {
        const Shares::Tree& tree = trees[item / shape.kv_heads];
        const int64_t kv_head = item % shape.kv_heads;
        float* total = at(tree.first, kv_head * group);
        for (int64_t member = 0; member < group; ++member)
            for (int64_t i = tree.first; i < tree.end; ++i)
                if (member > 0 || i > tree.first) add(shares.all()[i], at(i, kv_head * group + member), total);
        finish(tree, kv_head, total);
    });
}

// The same by the processor's matrix unit (attention_amx.cpp): products of bfloat16 numbers summed in fp32.
bool has_matrix_unit();
void forward_by_matrix_unit(int threads, const std::vector<Segment>& all, const Shape& shape,
                            const Heads<const simd::Bf16>& q, const Heads<const simd::Bf16>& k,
                            const Heads<const simd::Bf16>& v, const Heads<simd::Bf16>& out, float* lse);
void backward_by_matrix_unit(int threads, const std::vector<Segment>& all, const Shape& shape,
                             const BackwardHeads<simd::Bf16>& heads, const Heads<const simd::Bf16>& k,
                             const Heads<const simd::Bf16>& v, const Heads<simd::Bf16>& to_dk,
                             const Heads<simd::Bf16>& to_dv);

}  // namespace attention
