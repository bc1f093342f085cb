// Attention of one query a row to the keys that the row has in pages of a pool; see engine/kernels/reference.py.
//
// A row's numbers do not depend on the other rows. Rows that share pages are next to each other, and one thread takes
// several rows of one key/value head, so that it reads what they share from its caches.
#include <algorithm>
#include <limits>

#include "attention.h"
#include "common.h"
#include "simd.h"

namespace {

using simd::Float;
using simd::LANES;

constexpr int64_t ROWS = 8;  // of a task

// Keys or values of one head: place p of the pool is at data + p * stride.
template <class T>
struct Pool {
    const T* data;
    int64_t stride;
};

// The places of a row's keys, page by page: body(first key, keys, first place).
struct Pages {
    const int32_t* table;
    int64_t count, page;

    template <class Body>
    SIMD_INLINE void each(Body body) const {
        for (int64_t first = 0; first < count; first += page)
            body(first, std::min(page, count - first), (int64_t)table[first / page] * page);
    }
};

// Products of a query and a key, in as many sums as a vector has lanes.
template <class T>
SIMD_INLINE Float products(const T* a, const T* b, int64_t size) {
    Float sums[4] = {};
    simd::for_each(size, [&](auto which, int64_t d, int64_t count) {
        sums[which] += simd::load_up_to(a + d, count) * simd::load_up_to(b + d, count);
    });
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Scores of a query and `count` keys that follow each other. The lanes of LANES keys are summed side by side, each
// key's pairwise.
template <class T>
void score(const T* query, const T* keys, int64_t stride, int64_t count, int64_t dim, float scale, float* to) {
    for (int64_t first = 0; first < count; first += LANES) {
        const int64_t some = std::min<int64_t>(LANES, count - first);
        Float lanes[LANES] = {};
        for (int64_t i = 0; i < some; ++i) lanes[i] = products(query, keys + (first + i) * stride, dim);
        simd::transpose(lanes);
#pragma GCC unroll 4
        for (int width = LANES / 2; width > 0; width /= 2)
#pragma GCC unroll 8
            for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
        simd::store_up_to(to + first, lanes[0] * scale, some);
    }
}

// scores become exp(score - max); returns their sum.
float exponentials(float* scores, int64_t count) {
    const float lowest = -std::numeric_limits<float>::infinity();
    Float largest = simd::splat(lowest);
    int64_t whole = 0;
    for (; whole + LANES <= count; whole += LANES) {
        const Float value = simd::load(scores + whole);
        largest = value > largest ? value : largest;
    }
    float max = lowest;
    for (int lane = 0; lane < LANES; ++lane) max = std::max(max, largest[lane]);
    for (int64_t i = whole; i < count; ++i) max = std::max(max, scores[i]);
    Float sums = {};
    simd::for_each(count, [&](auto, int64_t i, int64_t lanes) {
        Float value = simd::exp(simd::load_up_to(scores + i, lanes) - max);
        for (int64_t lane = lanes; lane < LANES; ++lane) value[lane] = 0.0f;
        simd::store_up_to(scores + i, value, lanes);
        sums += value;
    });
    return simd::sum(sums);
}

// Features [d, d + VECTORS * LANES) of the weighted sum of a row's values; of one vector only `count` of them.
template <int VECTORS, class T>
void weigh(const Pages& pages, const Pool<T>& values, int64_t d, const float* weights, float inverse, T* out,
           int64_t count = LANES) {
    Float sums[VECTORS] = {};
    pages.each([&](int64_t first, int64_t keys, int64_t place) {
        const T* value = values.data + place * values.stride + d;
        for (int64_t i = 0; i < keys; ++i, value += values.stride)
#pragma GCC unroll 4
            for (int n = 0; n < VECTORS; ++n)
                sums[n] += simd::load_up_to(value + n * LANES, count) * weights[first + i];
    });
#pragma GCC unroll 4
    for (int n = 0; n < VECTORS; ++n) simd::store_up_to(out + d + n * LANES, sums[n] * inverse, count);
}

template <class T>
void attend(const Pages& pages, const Pool<T>& keys, const Pool<T>& values, const T* query, int64_t dim, float scale,
            T* out) {
    float* weights = common::scratch(pages.count);
    pages.each([&](int64_t first, int64_t count, int64_t place) {
        score(query, keys.data + place * keys.stride, keys.stride, count, dim, scale, weights + first);
    });
    const float inverse = 1.0f / exponentials(weights, pages.count);
    int64_t d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES) weigh<4>(pages, values, d, weights, inverse, out);
    for (; d + 2 * LANES <= dim; d += 2 * LANES) weigh<2>(pages, values, d, weights, inverse, out);
    for (; d < dim; d += LANES) weigh<1>(pages, values, d, weights, inverse, out, std::min<int64_t>(LANES, dim - d));
}

}  // namespace

// keys, values: [places, kv_heads, dim] with `place_*` elements between places. table: int32, the pages of each row,
// ld_table apart; counts: how many keys each has, at least 1. out: like q, [rows, heads, dim].
EXPORT void engine_paged_attention(int threads, int type, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim,
                                   float scale, const void* q, int64_t row_q, int64_t head_q, const void* keys,
                                   int64_t place_k, int64_t head_k, const void* values, int64_t place_v, int64_t head_v,
                                   const int32_t* table, int64_t ld_table, const int64_t* counts, int64_t page,
                                   void* out, int64_t row_out, int64_t head_out) {
    simd::with_type(type, [=](auto zero) {
        using T = decltype(zero);
        const attention::Heads<const T> queries{(const T*)q, row_q, head_q};
        const attention::Heads<T> to{(T*)out, row_out, head_out};
        const int64_t tasks = common::ceil_div(rows, ROWS), group = heads / kv_heads;
        common::parallel_for(threads, tasks * kv_heads, [=](int64_t item) {
            const int64_t kv_head = item % kv_heads, first = item / kv_heads * ROWS;
            const Pool<T> k{(const T*)keys + kv_head * head_k, place_k}, v{(const T*)values + kv_head * head_v, place_v};
            for (int64_t row = first; row < std::min(rows, first + ROWS); ++row)
                for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head)
                    attend<T>({table + row * ld_table, counts[row], page}, k, v, queries.at(row, head), dim, scale,
                              to.at(row, head));
        });
    });
}
REPLAYED(engine_paged_attention)
