// Rotary position embedding (Su et al., arXiv 2104.09864), half-split, fused with the split of a query-key-value
// product.
#include <algorithm>

#include "common.h"
#include "heads.h"
#include "simd.h"

namespace {

using heads::Heads;
using simd::Float;
using simd::LANES;

constexpr int64_t ROWS = 8;

// (first, second) -> (first cos - second sin, second cos + first sin); `sign` -1 turns back.
template <class T>
void rotate(const T* from, const float* cos, const float* sin, float sign, int64_t half, T* to) {
    for (int64_t d = 0; d < half; d += LANES) {
        const int64_t rest = half - d;
        const Float first = simd::load_up_to(from + d, rest), second = simd::load_up_to(from + half + d, rest);
        const Float c = simd::load_up_to(cos + d, rest), s = simd::load_up_to(sin + d, rest) * sign;
        simd::store_up_to(to + d, first * c - second * s, rest);
        simd::store_up_to(to + half + d, second * c + first * s, rest);
    }
}

template <class T>
void split_rotate(int threads, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t half, const T* qkv,
                  int64_t ld_qkv, const float* cos, const float* sin, T* q, T* k, T* v) {
    const int64_t dim = 2 * half;
    common::parallel_for(threads, common::ceil_div(tokens, ROWS), [=](int64_t item) {
        for (int64_t t = item * ROWS; t < tokens && t < (item + 1) * ROWS; ++t) {
            const T* from = qkv + t * ld_qkv;
            const float *c = cos + t * half, *s = sin + t * half;
            for (int64_t h = 0; h < heads; ++h) rotate(from + h * dim, c, s, 1.0f, half, q + (t * heads + h) * dim);
            from += heads * dim;
            for (int64_t h = 0; h < kv_heads; ++h)
                rotate(from + h * dim, c, s, 1.0f, half, k + (t * kv_heads + h) * dim);
            from += kv_heads * dim;
            std::copy(from, from + kv_heads * dim, v + t * kv_heads * dim);
        }
    });
}

template <class T>
void split_rotate_backward(int threads, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t half,
                           const Heads<const T>& dq, const Heads<const T>& dk, const Heads<const T>& dv, const float* cos,
                           const float* sin, T* dqkv, int64_t ld_dqkv) {
    const int64_t dim = 2 * half;
    common::parallel_for(threads, common::ceil_div(tokens, ROWS), [=](int64_t item) {
        for (int64_t t = item * ROWS; t < tokens && t < (item + 1) * ROWS; ++t) {
            T* to = dqkv + t * ld_dqkv;
            const float *c = cos + t * half, *s = sin + t * half;
            for (int64_t h = 0; h < heads; ++h, to += dim)
                rotate(dq.at(t, h), c, s, -1.0f, half, to);
            for (int64_t h = 0; h < kv_heads; ++h, to += dim)
                rotate(dk.at(t, h), c, s, -1.0f, half, to);
            for (int64_t h = 0; h < kv_heads; ++h, to += dim) {
                const T* from = dv.at(t, h);
                std::copy(from, from + dim, to);
            }
        }
    });
}

}  // namespace

// qkv [tokens, (heads + 2 kv_heads) * 2 half] -> q, k, v without gaps; cos and sin: fp32 [tokens, half].
EXPORT void engine_split_rotate(int threads, int type, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t half,
                                const void* qkv, int64_t ld_qkv, const float* cos, const float* sin, void* q, void* k,
                                void* v) {
    simd::with_type(type, [=](auto zero) {
        using T = decltype(zero);
        split_rotate(threads, tokens, heads, kv_heads, half, (const T*)qkv, ld_qkv, cos, sin, (T*)q, (T*)k, (T*)v);
    });
}
REPLAYED(engine_split_rotate)

// dq, dk, dv: [tokens, heads, 2 half], each with its own distance between tokens and between heads.
EXPORT void engine_split_rotate_backward(int threads, int type, int64_t tokens, int64_t heads, int64_t kv_heads,
                                         int64_t half, const void* dq, int64_t token_dq, int64_t head_dq,
                                         const void* dk, int64_t token_dk, int64_t head_dk, const void* dv,
                                         int64_t token_dv, int64_t head_dv, const float* cos, const float* sin,
                                         void* dqkv, int64_t ld_dqkv) {
    simd::with_type(type, [=](auto zero) {
        using T = decltype(zero);
        split_rotate_backward<T>(threads, tokens, heads, kv_heads, half, {(const T*)dq, token_dq, head_dq},
                                 {(const T*)dk, token_dk, head_dk}, {(const T*)dv, token_dv, head_dv}, cos, sin,
                                 (T*)dqkv, ld_dqkv);
    });
}
