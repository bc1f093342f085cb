// Attention on bfloat16 tensors by AMX tiles; the mathematics is that of attention.cpp.
//
// Scores are computed transposed, [keys, queries]: a tile of sums then has queries along its lanes, so that a softmax
// runs over rows, and its rows are, rounded to bfloat16, what the next products read: pairs of rows interleaved as a
// right operand, rows as they are as a left one. Nothing between products is transposed.
//
//     forward     S^T = K q^T     o^T = V^T P^T
//     backward    S^T = K q^T     dP^T = V do^T     dv = P^T do     dk = dS^T q     dq^T = K^T dS^T
//
// P and dS are rounded to bfloat16 as operands; softmax and all sums are fp32.
#include "amx.h"
#include "attention.h"

namespace attention {

using simd::Bf16;

#if HAS_AMX

namespace {

using simd::Float;
using simd::LANES;
using namespace amx;
typedef int32_t Int __attribute__((vector_size(64)));

constexpr int64_t QUERIES = 64;  // of a block
constexpr int64_t GROUPS = QUERIES / LANES;
constexpr int64_t KEYS = 512;    // of a block
// Buffers of a thread, of any element type.
template <int slot, class T>
T* buffer(int64_t elements) {
    return (T*)common::scratch<slot>((elements * (int64_t)sizeof(T) + 3) / 4);
}

// [rows, dim] -> [padded rows, padded dim], zeros around.
void copy_padded(const Bf16* from, int64_t ld, int64_t rows, int64_t dim, Bf16* to) {
    const int64_t width = padded(dim);
    for (int64_t row = 0; row < padded(rows); ++row) {
        const int64_t count = row < rows ? dim : 0;
        if (count) std::copy(from + row * ld, from + row * ld + count, to + row * width);
        std::fill(to + row * width + count, to + (row + 1) * width, Bf16{0});
    }
}

// [rows, width] without gaps -> its transpose [width, rows]; both multiples of STEP.
void transpose(const Bf16* from, int64_t rows, int64_t width, Bf16* to) {
    for (int64_t first = 0; first < rows; first += STEP)
        for (int64_t column = 0; column < width; ++column)
            for (int64_t row = first; row < first + STEP; ++row) to[column * rows + row] = from[row * width + column];
}

// Rows [QUERIES, width] as the right operand of a product over the width: [width / 2, QUERIES] words.
void pair_columns(const Bf16* rows, int64_t width, uint32_t* to) {
    const __m512i index = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                             _mm512_set1_epi32((int)width / 2));
    for (int64_t pair = 0; pair < width / 2; ++pair)
        for (int64_t row = 0; row < QUERIES; row += LANES)
            _mm512_storeu_si512(to + pair * QUERIES + row,
                                _mm512_i32gather_epi32(index, (const int*)(rows + row * width) + pair, 4));
}

// Rows [QUERIES, width] as the right operand of a product over the rows: [QUERIES / 2, width] words.
void pair_rows(const Bf16* rows, int64_t width, uint32_t* to) {
    for (int64_t row = 0; row < QUERIES; row += 2)
        for (int64_t column = 0; column < width; column += LANES) {
            simd::HalfWord even, odd;
            memcpy(&even, rows + row * width + column, sizeof even);
            memcpy(&odd, rows + (row + 1) * width + column, sizeof odd);
            store_pair(to + row / 2 * width + column, even, odd);
        }
}

// from [dim, QUERIES] -> to [rows, dim].
void store_transposed(const float* from, int64_t rows, int64_t dim, Bf16* to, int64_t ld) {
    const __m512i index = _mm512_slli_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), 6);
    static_assert(QUERIES == 64, "the shift above");
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t d = 0; d < dim; d += LANES)  // `from` has padded(dim) rows
            simd::store_up_to(to + row * ld + d, (Float)_mm512_i32gather_ps(index, from + d * QUERIES + row, 4),
                              dim - d);
}

// Which keys a block of queries sees, as lanes.
struct Sight {
    Sight(const View& view, int64_t first, int64_t rows) : all(view.seen(first)) {
        for (int64_t row = 0; row < QUERIES; ++row)
            seen[row / LANES][row % LANES] = (int)view.seen(first + std::min(row, rows - 1));
    }
    // value where the lane's query sees the key, else `other`
    SIMD_INLINE Float keep(Float value, int64_t group, int64_t key, float other) const {
        if (key < all) return value;
        return (int)key - Int{} < seen[group] ? value : simd::splat(other);
    }
    int64_t all;  // so many keys are seen by all
    Int seen[GROUPS];
};

// Keys and values of every segment and key/value head, padded: K, then V^T in forward, or V and K^T in backward.
class Operands {
  public:
    Operands(int threads, const std::vector<Segment>& all, const Shape& shape, const Heads<const Bf16>& k,
             const Heads<const Bf16>& v, bool backward)
        : kv_heads_(shape.kv_heads) {
        const int64_t width = padded(shape.dim), parts = backward ? 3 : 2;
        int64_t size = 0;
        for (const Segment& segment : all) {
            starts_.push_back(size);
            sizes_.push_back(padded(segment.keys) * width);
            size += parts * sizes_.back() * kv_heads_;
        }
        parts_ = parts;
        memory_.reset(new Bf16[(size_t)size + 32]);
        data_ = (Bf16*)(((uintptr_t)memory_.get() + 63) & ~(uintptr_t)63);
        common::parallel_for(threads, (int64_t)all.size() * kv_heads_, [&](int64_t item) {
            const int64_t i = item / kv_heads_, head = item % kv_heads_, rows = padded(all[i].keys);
            copy_padded(k.at(all[i].first_key, head), k.token, all[i].keys, shape.dim, part(i, head, 0));
            if (backward) {
                copy_padded(v.at(all[i].first_key, head), v.token, all[i].keys, shape.dim, part(i, head, 1));
                transpose(part(i, head, 0), rows, width, part(i, head, 2));
            } else {
                Bf16* values = buffer<0, Bf16>(sizes_[i]);
                copy_padded(v.at(all[i].first_key, head), v.token, all[i].keys, shape.dim, values);
                transpose(values, rows, width, part(i, head, 1));
            }
        });
    }
    Bf16* part(int64_t segment, int64_t head, int64_t which) const {
        return data_ + starts_[segment] + (head * parts_ + which) * sizes_[segment];
    }

  private:
    int64_t kv_heads_, parts_;
    std::vector<int64_t> starts_, sizes_;
    std::unique_ptr<Bf16[]> memory_;
    Bf16* data_;
};

// Running softmax of a block of queries, a lane each.
struct Softmax {
    Float maximum[GROUPS], total[GROUPS];
    bool summed = false;
    Softmax() {
        for (int64_t g = 0; g < GROUPS; ++g) maximum[g] = simd::splat(-INFINITY), total[g] = Float{};
    }
    // scores [keys, QUERIES] from key `first` on become P^T as a right operand; `sums`, where there are any yet, are
    // rescaled to the new maximum.
    void take(const float* scores, int64_t first, int64_t keys, const Sight& sight, float scale, uint32_t* p,
              float* sums, int64_t sum_rows) {
        for (int64_t g = 0; g < GROUPS; ++g) {
            Float top[2] = {simd::splat(-INFINITY), simd::splat(-INFINITY)};
            for (int64_t key = 0; key < keys; ++key) {
                const Float s = simd::load(scores + key * QUERIES + g * LANES);
                const Float value = sight.keep(s, g, first + key, -INFINITY);
                // NaN wins, so that it shows
                top[key & 1] = value <= top[key & 1] ? top[key & 1] : value;
            }
            Float highest = simd::rounded((top[0] <= top[1] ? top[1] : top[0]) * scale);
            highest = highest <= maximum[g] ? maximum[g] : highest;
            const Float base = highest == -INFINITY ? Float{} : highest;
            const Float factor = simd::exp(maximum[g] - base);
            maximum[g] = highest;
            Float added[2] = {};
            for (int64_t key = 0; key < keys; key += 2) {
                const float* s = scores + key * QUERIES + g * LANES;
                const Float x0 = simd::rounded(simd::load(s) * scale), x1 = simd::rounded(simd::load(s + QUERIES) * scale);
                const Float p0 = sight.keep(simd::exp(x0 - base), g, first + key, 0.0f);
                const Float p1 = sight.keep(simd::exp(x1 - base), g, first + key + 1, 0.0f);
                added[0] += p0;
                added[1] += p1;
                store_pair(p + key / 2 * QUERIES + g * LANES, simd::narrow(p0), simd::narrow(p1));
            }
            total[g] = total[g] * factor + (added[0] + added[1]);
            for (int64_t row = 0; summed && row < sum_rows; ++row) {
                float* to = sums + row * QUERIES + g * LANES;
                simd::store(to, simd::load(to) * factor);
            }
        }
        summed = true;
    }
};

void forward_block(const Shape& shape, const Segment& segment, int64_t first, int64_t rows, const Bf16* q,
                   int64_t token_q, const Operands& operands, int64_t kv_head, Bf16* out, int64_t token_out,
                   float* lse) {
    const int64_t width = padded(shape.dim);
    Bf16* block = buffer<0, Bf16>(QUERIES * width);
    uint32_t* q_pairs = buffer<1, uint32_t>(QUERIES * width / 2);
    float *scores = buffer<2, float>(KEYS * QUERIES), *sums = buffer<3, float>(width * QUERIES);
    uint32_t* p = buffer<4, uint32_t>(KEYS / 2 * QUERIES);
    std::fill(block, block + QUERIES * width, Bf16{0});
    copy_padded(q, token_q, rows, shape.dim, block);
    pair_columns(block, width, q_pairs);
    std::fill(sums, sums + width * QUERIES, 0.0f);
    Softmax softmax;
    for (const View& view : segment.views) {
        const Bf16 *keys = operands.part(view.segment, kv_head, 0), *values = operands.part(view.segment, kv_head, 1);
        const Sight sight(view, first, rows);
        const int64_t end = view.seen(first + rows - 1), ld_values = padded(view.keys);
        for (int64_t key = 0; key < end; key += KEYS) {
            const int64_t count = padded(std::min(KEYS, end - key));
            product<false>(count, QUERIES, width, keys + key * width, width, q_pairs, QUERIES, scores, QUERIES);
            softmax.take(scores, key, count, sight, shape.scale, p, sums, width);
            product<true>(width, QUERIES, count, values + key, ld_values, p, QUERIES, sums, QUERIES);
        }
    }
    for (int64_t g = 0; g < GROUPS; ++g) {
        const Float inverse = 1.0f / softmax.total[g];
        for (int64_t d = 0; d < shape.dim; ++d) {
            float* to = sums + d * QUERIES + g * LANES;
            simd::store(to, simd::load(to) * inverse);
        }
    }
    store_transposed(sums, rows, shape.dim, out, token_out);
    for (int64_t row = 0; row < rows; ++row)
        lse[row * shape.heads] =
            softmax.maximum[row / LANES][row % LANES] + std::log(softmax.total[row / LANES][row % LANES]);
}

// P^T and dS^T from S^T and dP^T: as left operands, dS^T as a right one too.
void backward_block(const float* scores, const float* dp, int64_t first, int64_t keys, const Sight& sight, float scale,
                    const float* lse, const float* delta, Bf16* p_rows, Bf16* ds_rows, uint32_t* ds_pairs) {
    for (int64_t key = 0; key < keys; key += 2)
        for (int64_t g = 0; g < GROUPS; ++g) {
            const Float shift = simd::load(lse + g * LANES), less = simd::load(delta + g * LANES);
            simd::HalfWord ds[2];
            for (int64_t i = 0; i < 2; ++i) {
                const int64_t at = (key + i) * QUERIES + g * LANES;
                const Float x = simd::rounded(simd::load(scores + at) * scale);
                const Float p = sight.keep(simd::exp(x - shift), g, first + key + i, 0.0f);
                const Float value = scale * p * (simd::load(dp + at) - less);
                ds[i] = simd::narrow(sight.keep(value, g, first + key + i, 0.0f));
                simd::store(p_rows + at, p);
                memcpy(ds_rows + at, &ds[i], sizeof ds[i]);
            }
            store_pair(ds_pairs + key / 2 * QUERIES + g * LANES, ds[0], ds[1]);
        }
}

void backward_head(const Shape& shape, const Segment& segment, int64_t head, const BackwardHeads<Bf16>& heads,
                   const Operands& operands, const Share& share, float* dk, float* dv) {
    const int64_t width = padded(shape.dim), kv_head = head / shape.group();
    Bf16* blocks = buffer<0, Bf16>(2 * QUERIES * width);
    Bf16 *q = blocks, *dout = blocks + QUERIES * width;
    uint32_t* pairs = buffer<1, uint32_t>(4 * QUERIES * width / 2);
    uint32_t *q_columns = pairs, *dout_columns = pairs + QUERIES * width / 2;
    uint32_t *q_rows = dout_columns + QUERIES * width / 2, *dout_rows = q_rows + QUERIES * width / 2;
    float* scores = buffer<2, float>(2 * KEYS * QUERIES + width * QUERIES);
    float *dp = scores + KEYS * QUERIES, *dq = dp + KEYS * QUERIES;
    Bf16* p_rows = buffer<4, Bf16>(2 * KEYS * QUERIES);
    uint32_t* ds_pairs = buffer<5, uint32_t>(KEYS / 2 * QUERIES);
    for (int64_t first = 0; first < segment.queries; first += QUERIES) {
        const int64_t rows = std::min(QUERIES, segment.queries - first), token = segment.first_query + first;
        std::fill(blocks, blocks + 2 * QUERIES * width, Bf16{0});
        copy_padded(heads.q.at(token, head), heads.q.token, rows, shape.dim, q);
        copy_padded(heads.dout.at(token, head), heads.dout.token, rows, shape.dim, dout);
        pair_columns(q, width, q_columns);
        pair_columns(dout, width, dout_columns);
        pair_rows(q, width, q_rows);
        pair_rows(dout, width, dout_rows);
        alignas(64) float lse[QUERIES] = {}, delta[QUERIES] = {};
        for (int64_t row = 0; row < rows; ++row) {
            lse[row] = heads.lse[(token + row) * shape.heads + head];
            Float sum = {};
            const Bf16 *left = dout + row * width, *right = heads.out.at(token + row, head);
            for (int64_t d = 0; d < shape.dim; d += LANES)
                sum += simd::load_up_to(left + d, shape.dim - d) * simd::load_up_to(right + d, shape.dim - d);
            delta[row] = simd::sum(sum);
        }
        std::fill(dq, dq + width * QUERIES, 0.0f);
        for (const View& view : segment.views) {
            const Bf16 *keys = operands.part(view.segment, kv_head, 0), *values = operands.part(view.segment, kv_head, 1);
            const Bf16* keys_transposed = operands.part(view.segment, kv_head, 2);
            const Sight sight(view, first, rows);
            const int64_t end = view.seen(first + rows - 1), ld_keys = padded(view.keys);
            const int64_t offset = share.row_of(view.segment) * width;
            for (int64_t key = 0; key < end; key += KEYS) {
                const int64_t count = padded(std::min(KEYS, end - key));
                float *to_dk = dk + offset + key * width, *to_dv = dv + offset + key * width;
                product<false>(count, QUERIES, width, keys + key * width, width, q_columns, QUERIES, scores, QUERIES);
                product<false>(count, QUERIES, width, values + key * width, width, dout_columns, QUERIES, dp, QUERIES);
                backward_block(scores, dp, key, count, sight, shape.scale, lse, delta, p_rows, p_rows + KEYS * QUERIES,
                               ds_pairs);
                product<true>(count, width, QUERIES, p_rows, QUERIES, dout_rows, width, to_dv, width);
                product<true>(count, width, QUERIES, p_rows + KEYS * QUERIES, QUERIES, q_rows, width, to_dk, width);
                product<true>(width, QUERIES, count, keys_transposed + key, ld_keys, ds_pairs, QUERIES, dq, QUERIES);
            }
        }
        store_transposed(dq, rows, shape.dim, heads.dq.at(token, head), heads.dq.token);
    }
}

}  // namespace

bool has_matrix_unit() {
    static const bool has = amx::ask();
    return has;
}

void forward_by_matrix_unit(int threads, const std::vector<Segment>& all, const Shape& shape,
                            const Heads<const Bf16>& q, const Heads<const Bf16>& k, const Heads<const Bf16>& v,
                            const Heads<Bf16>& out, float* lse) {
    const Operands operands(threads, all, shape, k, v, false);
    struct Task {
        int64_t segment, head, first;
    };
    constexpr int64_t SOME = 4 * QUERIES;
    std::vector<Task> tasks;
    for (int64_t i = 0; i < (int64_t)all.size(); ++i)
        for (int64_t head = 0; head < shape.heads; ++head)
            for (int64_t first = 0; first < all[i].queries; first += SOME) tasks.push_back({i, head, first});
    common::parallel_for(threads, (int64_t)tasks.size(), [&](int64_t item) {
        const Tiles tiles;
        const Task& task = tasks[item];
        const Segment& segment = all[task.segment];
        const int64_t end = std::min(task.first + SOME, segment.queries);
        for (int64_t first = task.first; first < end; first += QUERIES) {
            const int64_t token = segment.first_query + first;
            forward_block(shape, segment, first, std::min(QUERIES, end - first), q.at(token, task.head), q.token,
                          operands, task.head / shape.group(), out.at(token, task.head), out.token,
                          lse + token * shape.heads + task.head);
        }
    });
}

void backward_by_matrix_unit(int threads, const std::vector<Segment>& all, const Shape& shape,
                             const BackwardHeads<Bf16>& heads, const Heads<const Bf16>& k, const Heads<const Bf16>& v,
                             const Heads<Bf16>& to_dk, const Heads<Bf16>& to_dv) {
    const Operands operands(threads, all, shape, k, v, true);
    sum_groups(
        threads, all, shape, padded(shape.dim), [&](int64_t i) { return padded(all[i].keys); },
        [&](const Share& share, int64_t head, float* dk, float* dv) {
            const Tiles tiles;
            for (int64_t i = share.first; i < share.last; ++i)
                backward_head(shape, all[i], head, heads, operands, share, dk, dv);
        },
        to_dk, to_dv);
}

#else

bool has_matrix_unit() { return false; }

void forward_by_matrix_unit(int, const std::vector<Segment>&, const Shape&, const Heads<const Bf16>&,
                            const Heads<const Bf16>&, const Heads<const Bf16>&, const Heads<Bf16>&, float*) {}

void backward_by_matrix_unit(int, const std::vector<Segment>&, const Shape&, const BackwardHeads<Bf16>&,
                             const Heads<const Bf16>&, const Heads<const Bf16>&, const Heads<Bf16>&,
                             const Heads<Bf16>&) {}

#endif

}  // namespace attention
