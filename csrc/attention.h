// What the two directions of attention share: segments, strided heads, and keys and values in panels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cmath>
#include <memory>
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

struct Segment {
    int64_t first_query, queries, first_key, keys;
    bool causal;
    // How many keys, from the first on, query `i` of the segment sees.
    int64_t seen(int64_t i) const { return causal ? std::min(i + 1, keys) : keys; }
};

inline std::vector<Segment> read_segments(int64_t count, const int64_t* values) {
    std::vector<Segment> segments;
    for (const int64_t* v = values; v < values + 5 * count; v += 5)
        segments.push_back({v[0], v[1], v[2], v[3], v[4] != 0});
    return segments;
}

// Rows [first_row, first_row + rows) of a segment against its keys [first_key, first_key + keys).
struct Block {
    Block(const Segment& segment, int64_t first_row, int64_t rows, int64_t first_key, int64_t keys)
        : rows(rows), first_key(first_key), keys(keys), segment_keys(segment.keys), segment_(segment),
          first_row_(first_row) {}

    // Of the block's keys, how many row `row` of the block sees; may be negative.
    int64_t seen(int64_t row) const { return std::min(segment_.seen(first_row_ + row) - first_key, keys); }

    int64_t first_row_that_sees(int64_t key) const {
        return segment_.causal ? std::max<int64_t>(first_key + key - first_row_, 0) : 0;
    }

    int64_t rows, first_key, keys, segment_keys;

  private:
    const Segment& segment_;
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

// dk and dv of a group of query heads: each head's in fp32 by `head_into(segment, head, dk, dv)`, which adds to
// [rows_of(segment), ld] zeros, then their sum in order, whichever thread computed them, stored once.
template <class T, class RowsOf, class HeadInto>
void sum_groups(int threads, const std::vector<Segment>& all, const Shape& shape, int64_t ld, const RowsOf& rows_of,
                const HeadInto& head_into, const Heads<T>& to_dk, const Heads<T>& to_dv) {
    const int64_t group = shape.group(), segments = (int64_t)all.size();
    const auto fill = [&](int64_t i, int64_t head, float* rows) {
        const int64_t floats = rows_of(i) * ld;
        std::fill(rows, rows + 2 * floats, 0.0f);
        head_into(i, head, rows, rows + floats);
    };
    const auto add = [&](int64_t i, const float* rows, float* total) {
        for (int64_t j = 0; j < 2 * rows_of(i) * ld; ++j) total[j] += rows[j];
    };
    const auto finish = [&](int64_t i, int64_t kv_head, const float* total) {
        for (int64_t key = 0; key < all[i].keys; ++key) {
            store_row(total + key * ld, shape.dim, to_dk.at(all[i].first_key + key, kv_head));
            store_row(total + (rows_of(i) + key) * ld, shape.dim, to_dv.at(all[i].first_key + key, kv_head));
        }
    };
    if (group == 1 || segments * shape.kv_heads >= 2 * (int64_t)threads) {
        common::parallel_for(threads, segments * shape.kv_heads, [&](int64_t item) {
            const int64_t i = item / shape.kv_heads, kv_head = item % shape.kv_heads, floats = rows_of(i) * ld;
            float* total = common::scratch<3>(4 * floats);
            for (int64_t member = 0; member < group; ++member) {
                float* rows = member > 0 ? total + 2 * floats : total;
                fill(i, kv_head * group + member, rows);
                if (member > 0) add(i, rows, total);
            }
            finish(i, kv_head, total);
        });
        return;
    }
    // few pairs of document and key/value head: one query head a task, and a second pass for the sums
    int64_t largest = 0;
    for (int64_t i = 0; i < segments; ++i) largest = std::max(largest, 2 * rows_of(i) * ld);
    const std::unique_ptr<float[]> memory(new float[(size_t)(segments * shape.heads * largest)]);
    common::parallel_for(threads, segments * shape.heads, [&](int64_t item) {
        fill(item / shape.heads, item % shape.heads, memory.get() + item * largest);
    });
    common::parallel_for(threads, segments * shape.kv_heads, [&](int64_t item) {
        const int64_t i = item / shape.kv_heads, kv_head = item % shape.kv_heads;
        float* total = memory.get() + (i * shape.heads + kv_head * group) * largest;
        for (int64_t member = 1; member < group; ++member) add(i, total + member * largest, total);
        finish(i, kv_head, total);
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
