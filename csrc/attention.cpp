// Causal attention in blocks (Dao et al., arXiv 2205.14135), with grouped key/value heads.
//
//     s = scale q k^T    p = exp(s - lse)    o = p v    lse_i = log sum_j exp(s_ij)
//     dp = do v^T        ds = scale p (dp - sum(do o))
//     dq = ds k          dk = ds^T q         dv = p^T do
//
// Work comes as segments: a range of queries, a range of keys, whether query i sees only the keys 0 to i of the range,
// and a segment that this one continues: its queries see all keys of that one too, and of those that that one
// continues. Segments must not share queries; in backward not keys either. Keys and values of a segment are laid out
// once in panels, for all query heads and segments that read them. Nothing of the size queries x keys exists beyond a
// block.
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "common.h"
#include "simd.h"
#include "tiles.h"

namespace {

using attention::BackwardHeads;
using attention::Heads;
using attention::Packed;
using attention::Segment;
using attention::Shape;
using attention::Share;
using attention::View;
using attention::store_row;
using simd::Float;
using simd::LANES;
using tiles::PANEL;
using tiles::ROWS;

constexpr int64_t KEYS = 1024;           // of a block; a multiple of PANEL
constexpr int64_t QUERIES = 4 * ROWS;    // of a block in forward
constexpr int64_t TASK_QUERIES = 8 * QUERIES;
constexpr int64_t QUERIES_BACKWARD = 8 * ROWS;
constexpr int64_t DEPTH = 128;           // keys whose values stay in the first-level cache
constexpr int64_t LD = KEYS + LANES;     // between rows of scores: a power of two would put them into one cache set

// s[rows, keys] = q[rows, ld_q] * panels, keys up to those that the last row of each tile sees.
void scores(const float* q, int64_t ld_q, const float* panels, int64_t depth, const attention::Block& block, float* s) {
    for (int64_t key = 0; key < block.keys; key += PANEL) {
        const int64_t width = tiles::panel_width(block.segment_keys, block.first_key + key);
        const float* panel = panels + (block.first_key + key) * depth;
        for (int64_t row = 0; row < block.rows; row += ROWS) {
            const int64_t rows = std::min<int64_t>(ROWS, block.rows - row);
            const int64_t seen = std::min(block.seen(row + rows - 1) - key, width);
            if (seen <= 0) continue;
            tiles::tile_rows<false>(rows, {q + row * ld_q, ld_q, 1}, panel, width, common::ceil_div(seen, LANES), depth,
                                    s + row * LD + key, LD);
        }
    }
}

// out[rows, dim] += p[rows, keys] * panels of [segment_keys, dim].
void weighted_sum(const float* p, const float* panels, int64_t dim, const attention::Block& block, float* out,
                  int64_t ld_out) {
    for (int64_t column = 0; column < dim; column += PANEL) {
        const int64_t width = tiles::panel_width(dim, column);
        const float* panel = panels + column * block.segment_keys + block.first_key * width;
        for (int64_t key = 0; key < block.keys; key += DEPTH) {
            for (int64_t row = 0; row < block.rows; row += ROWS) {
                const int64_t rows = std::min<int64_t>(ROWS, block.rows - row);
                const int64_t depth = std::min(DEPTH, block.seen(row + rows - 1) - key);
                if (depth <= 0) continue;
                tiles::tile_rows<true>(rows, {p + row * LD + key, LD, 1}, panel + key * width, width, width / LANES,
                                       depth, out + row * ld_out + column, ld_out);
            }
        }
    }
}

// out[keys, dim] += p[rows, keys]^T * right[rows, ld]; rows that do not see a key have p = 0. `out` is `ld` wide too.
void transposed_sum(const float* p, const float* right, int64_t ld, const attention::Block& block, float* out) {
    for (int64_t column = 0; column < ld; column += PANEL) {
        const int64_t vectors = std::min(PANEL, ld - column) / LANES;
        for (int64_t key = 0; key < block.keys; key += ROWS) {
            const int64_t keys = std::min<int64_t>(ROWS, block.keys - key), row = block.first_row_that_sees(key);
            if (row >= block.rows) continue;
            tiles::tile_rows<true>(keys, {p + row * LD + key, 1, LD}, right + row * ld + column, ld, vectors,
                                   block.rows - row, out + (block.first_key + key) * ld + column, ld);
        }
    }
}

// Zeros from `first` to `end`.
SIMD_INLINE void clear(float* values, int64_t first, int64_t end) {
    if (first < end) std::fill(values + first, values + end, 0.0f);
}

// Turns a row of scores into exp(scale s - max) with the running maximum and sum of the softmax. Returns the factor for
// what was summed before.
float softmax_row(float* s, int64_t seen, float scale, float& maximum, float& total) {
    Float highest[4];
    for (Float& value : highest) value = simd::splat(-INFINITY);
    simd::for_each(seen / LANES * LANES, [&](auto which, int64_t offset, int64_t) {
        const Float value = simd::load(s + offset);
        highest[which] = value > highest[which] ? value : highest[which];
    });
    highest[0] = highest[1] > highest[0] ? highest[1] : highest[0];
    highest[2] = highest[3] > highest[2] ? highest[3] : highest[2];
    highest[0] = highest[2] > highest[0] ? highest[2] : highest[0];
    float top = -INFINITY;
    for (int lane = 0; lane < LANES; ++lane) top = std::max(top, highest[0][lane]);
    for (int64_t j = seen / LANES * LANES; j < seen; ++j) top = std::max(top, s[j]);
    const float before = maximum;
    maximum = std::max(maximum, top * scale);
    Float sums[4] = {};
    simd::for_each(seen, [&](auto which, int64_t offset, int64_t count) {
        const Float value = simd::exp(simd::rounded(simd::load_up_to(s + offset, count) * scale) - maximum);
        simd::store_up_to(s + offset, value, count);
        sums[which] += count >= LANES ? value : simd::load_part(s + offset, count);
    });
    const float factor = before == -INFINITY ? 0.0f : std::exp(before - maximum);
    total = total * factor + simd::sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    return factor;
}

// One block of queries of one head: rows [first, first + rows) of the segment.
template <class T>
void forward_block(const Shape& shape, const Segment& segment, int64_t first, int64_t rows, const T* q, int64_t token_q,
                   const Packed& packed, int64_t kv_head, T* out, int64_t token_out, float* lse, int64_t token_lse) {
    const int64_t ld_o = tiles::padded(shape.dim);
    float* s = common::scratch<0>(QUERIES * LD);
    float* o = common::scratch<1>(QUERIES * ld_o);
    float* queries = common::scratch<2>(QUERIES * ld_o);
    attention::gather_rows(q, token_q, rows, shape.dim, queries, ld_o);
    float maximum[QUERIES], total[QUERIES] = {};
    std::fill(maximum, maximum + rows, -INFINITY);
    std::fill(o, o + rows * ld_o, 0.0f);
    bool summed = false;
    for (const View& view : segment.views) {
        const float* key_panels = packed.keys_transposed(view.segment, kv_head);
        const float* value_panels = packed.values(view.segment, kv_head);
        const int64_t end = view.seen(first + rows - 1);
        for (int64_t key = 0; key < end; key += KEYS, summed = true) {
            const attention::Block block(view, first, rows, key, std::min(KEYS, end - key));
            scores(queries, ld_o, key_panels, shape.dim, block, s);
            for (int64_t row = 0; row < rows; ++row) {
                const int64_t seen = block.seen(row);
                if (seen > 0) {
                    const float factor = softmax_row(s + row * LD, seen, shape.scale, maximum[row], total[row]);
                    if (summed && factor != 1.0f)
                        for (int64_t d = 0; d < ld_o; ++d) o[row * ld_o + d] *= factor;
                }
                clear(s + row * LD, std::max<int64_t>(seen, 0), std::min(block.keys, seen + ROWS));
            }
            weighted_sum(s, value_panels, shape.dim, block, o, ld_o);
        }
    }
    for (int64_t row = 0; row < rows; ++row) {
        const float inverse = 1.0f / total[row];
        simd::for_each(shape.dim, [=](auto, int64_t d, int64_t count) {
            simd::store_up_to(out + row * token_out + d, simd::load_up_to(o + row * ld_o + d, count) * inverse, count);
        });
        lse[row * token_lse] = maximum[row] + std::log(total[row]);
    }
}

// p = exp(scale s - lse), at most 1, in place of s, and ds = scale p (dp - delta) in place of dp; 0 where a key is not seen.
void backward_row(float* s, float* dp, int64_t seen, int64_t keys, float scale, float lse, float delta) {
    // as far as a tile that has seen keys of this row or of its neighbours reads
    const int64_t end = std::min(keys, seen + 2 * ROWS);
    seen = std::max<int64_t>(seen, 0);
    simd::for_each(seen, [&](auto, int64_t offset, int64_t count) {
        const Float p = simd::exp(simd::rounded(simd::load_up_to(s + offset, count) * scale) - lse);
        const Float ds = scale * p * (simd::load_up_to(dp + offset, count) - delta);
        simd::store_up_to(s + offset, p, count);
        simd::store_up_to(dp + offset, ds, count);
    });
    clear(s, seen, end);
    clear(dp, seen, end);
}

// One head of rows [first, first + rows) of a segment: dq, and their part of dk and dv into [share.rows, padded dim].
template <class T>
void backward_rows(const Shape& shape, const Segment& segment, int64_t first, int64_t rows, int64_t head,
                   const BackwardHeads<T>& heads, const Packed& packed, const Share& share, float* dk, float* dv) {
    const int64_t ld = tiles::padded(shape.dim), kv_head = head / shape.group(), token = segment.first_query + first;
    float* s = common::scratch<0>(QUERIES_BACKWARD * LD);
    float* dp = common::scratch<1>(QUERIES_BACKWARD * LD);
    float* dq = common::scratch<2>(3 * QUERIES_BACKWARD * ld);
    float *q = dq + QUERIES_BACKWARD * ld, *dout = q + QUERIES_BACKWARD * ld;
    attention::gather_rows(heads.q.at(token, head), heads.q.token, rows, shape.dim, q, ld);
    attention::gather_rows(heads.dout.at(token, head), heads.dout.token, rows, shape.dim, dout, ld);
    float delta[QUERIES_BACKWARD];
    for (int64_t row = 0; row < rows; ++row)
        delta[row] = attention::dot(dout + row * ld, heads.out.at(token + row, head), shape.dim);
    const int64_t next = token + rows, next_rows = std::min(QUERIES_BACKWARD, segment.queries - first - rows);
    attention::prefetch_rows(heads.q.at(next, head), heads.q.token, next_rows, shape.dim);
    attention::prefetch_rows(heads.dout.at(next, head), heads.dout.token, next_rows, shape.dim);
    attention::prefetch_rows(heads.out.at(next, head), heads.out.token, next_rows, shape.dim);
    std::fill(dq, dq + rows * ld, 0.0f);
    for (const View& view : segment.views) {
        const float* keys_transposed = packed.keys_transposed(view.segment, kv_head);
        const float* values_transposed = packed.values(view.segment, kv_head);
        const float* keys = packed.keys(view.segment, kv_head);
        const int64_t offset = share.row_of(view.segment) * ld, end = view.seen(first + rows - 1);
        for (int64_t key = 0; key < end; key += KEYS) {
            const attention::Block block(view, first, rows, key, std::min(KEYS, end - key));
            scores(q, ld, keys_transposed, shape.dim, block, s);
            scores(dout, ld, values_transposed, shape.dim, block, dp);
            for (int64_t row = 0; row < rows; ++row)
                backward_row(s + row * LD, dp + row * LD, block.seen(row), block.keys, shape.scale,
                             heads.lse[(token + row) * shape.heads + head], delta[row]);
            weighted_sum(dp, keys, shape.dim, block, dq, ld);
            transposed_sum(s, dout, ld, block, dv + offset);
            transposed_sum(dp, q, ld, block, dk + offset);
        }
    }
    for (int64_t row = 0; row < rows; ++row) store_row(dq + row * ld, shape.dim, heads.dq.at(token + row, head));
}

template <class T>
void forward(int threads, const std::vector<Segment>& all, const Shape& shape, const Heads<const T>& q,
             const Heads<const T>& k, const Heads<const T>& v, const Heads<T>& out, float* lse) {
    const Packed packed(threads, all, shape, k, v, false);
    struct Task {
        int64_t segment, head, first;
    };
    std::vector<Task> tasks;
    for (int64_t i = 0; i < (int64_t)all.size(); ++i)
        for (int64_t head = 0; head < shape.heads; ++head)
            for (int64_t first = 0; first < all[i].queries; first += TASK_QUERIES) tasks.push_back({i, head, first});
    common::parallel_for(threads, (int64_t)tasks.size(), [&](int64_t item) {
        const Task& task = tasks[item];
        const Segment& segment = all[task.segment];
        const int64_t end = std::min(task.first + TASK_QUERIES, segment.queries);
        for (int64_t first = task.first; first < end; first += QUERIES) {
            const int64_t token = segment.first_query + first;
            forward_block(shape, segment, first, std::min(QUERIES, end - first), q.at(token, task.head), q.token,
                          packed, task.head / shape.group(), out.at(token, task.head), out.token,
                          lse + token * shape.heads + task.head, shape.heads);
        }
    });
}

template <class T>
void backward(int threads, const std::vector<Segment>& all, const Shape& shape, const BackwardHeads<T>& heads,
              const Heads<const T>& k, const Heads<const T>& v, const Heads<T>& to_dk, const Heads<T>& to_dv) {
    const Packed packed(threads, all, shape, k, v, true);
    attention::sum_groups(
        threads, all, shape, tiles::padded(shape.dim), [&](int64_t i) { return all[i].keys; },
        [&](const Share& share, int64_t head, float* dk, float* dv) {
            for (int64_t i = share.first; i < share.last; ++i)
                for (int64_t first = 0; first < all[i].queries; first += QUERIES_BACKWARD)
                    backward_rows(shape, all[i], first, std::min(QUERIES_BACKWARD, all[i].queries - first), head, heads,
                                  packed, share, dk, dv);
        },
        to_dk, to_dv);
}

}  // namespace

// segments: `num_segments` x (first query, queries, first key, keys, causal, parent or -1). out like q; lse: fp32 [tokens, heads].
EXPORT void engine_attention_forward(int threads, int type, int64_t num_segments, const int64_t* segments,
                                     int64_t heads, int64_t kv_heads, int64_t dim, float scale, const void* q,
                                     int64_t token_q, int64_t head_q, const void* k, int64_t token_k, int64_t head_k,
                                     const void* v, int64_t token_v, int64_t head_v, void* out, int64_t token_out,
                                     int64_t head_out, float* lse) {
    simd::with_type(type, [=](auto zero) {
        using T = decltype(zero);
        const Heads<const T> q_heads{(const T*)q, token_q, head_q}, k_heads{(const T*)k, token_k, head_k};
        const Heads<const T> v_heads{(const T*)v, token_v, head_v};
        const Heads<T> to{(T*)out, token_out, head_out};
        const Shape shape{heads, kv_heads, dim, scale};
        const auto all = attention::read_segments(num_segments, segments);
        if constexpr (std::is_same<T, simd::Bf16>::value)
            if (attention::has_matrix_unit())
                return attention::forward_by_matrix_unit(threads, all, shape, q_heads, k_heads, v_heads, to, lse);
        forward(threads, all, shape, q_heads, k_heads, v_heads, to, lse);
    });
}

// dq [tokens, heads, dim], dk and dv [tokens, kv_heads, dim] are written where a segment reaches.
EXPORT void engine_attention_backward(int threads, int type, int64_t num_segments, const int64_t* segments,
                                      int64_t heads, int64_t kv_heads, int64_t dim, float scale, const void* dout,
                                      int64_t token_dout, int64_t head_dout, const void* q, int64_t token_q,
                                      int64_t head_q, const void* k, int64_t token_k, int64_t head_k, const void* v,
                                      int64_t token_v, int64_t head_v, const void* out, int64_t token_out,
                                      int64_t head_out, const float* lse, void* dq, int64_t token_dq, int64_t head_dq,
                                      void* dk, int64_t token_dk, int64_t head_dk, void* dv, int64_t token_dv,
                                      int64_t head_dv) {
    simd::with_type(type, [=](auto zero) {
        using T = decltype(zero);
        const BackwardHeads<T> of_queries{{(const T*)dout, token_dout, head_dout},
                                          {(const T*)q, token_q, head_q},
                                          {(const T*)out, token_out, head_out},
                                          lse,
                                          {(T*)dq, token_dq, head_dq}};
        const Heads<const T> k_heads{(const T*)k, token_k, head_k}, v_heads{(const T*)v, token_v, head_v};
        const Heads<T> to_dk{(T*)dk, token_dk, head_dk}, to_dv{(T*)dv, token_dv, head_dv};
        const Shape shape{heads, kv_heads, dim, scale};
        const auto all = attention::read_segments(num_segments, segments);
        if constexpr (std::is_same<T, simd::Bf16>::value)
            if (attention::has_matrix_unit())
                return attention::backward_by_matrix_unit(threads, all, shape, of_queries, k_heads, v_heads, to_dk,
                                                          to_dv);
        backward(threads, all, shape, of_queries, k_heads, v_heads, to_dk, to_dv);
    });
}
