// Rotary position embedding (Su et al., arXiv 2104.09864), half-split, fused with the split of a query-key-value
// product.
#include <algorithm>

#include "common.h"
#include "simd.h"

namespace {

using simd::Float;
using simd::LANES;

constexpr int64_t ROWS = 8;

// (first, second) -> (first cos - second sin, second cos + first sin); `sign` -1 turns back.
void rotate(const float* from, const float* cos, const float* sin, float sign, int64_t half, float* to) {
    for (int64_t d = 0; d < half; d += LANES) {
        const int64_t rest = half - d;
        const Float first = simd::load_up_to(from + d, rest), second = simd::load_up_to(from + half + d, rest);
        const Float c = simd::load_up_to(cos + d, rest), s = simd::load_up_to(sin + d, rest) * sign;
        simd::store_up_to(to + d, first * c - second * s, rest);
        simd::store_up_to(to + half + d, second * c + first * s, rest);
    }
}

}  // namespace

// qkv [tokens, (heads + 2 kv_heads) * 2 half] -> q, k, v without gaps; cos and sin: [tokens, half].
EXPORT void engine_split_rotate(int threads, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t half,
                                const float* qkv, int64_t ld_qkv, const float* cos, const float* sin, float* q,
                                float* k, float* v) {
    const int64_t dim = 2 * half;
    common::parallel_for(threads, common::ceil_div(tokens, ROWS), [=](int64_t item) {
        for (int64_t t = item * ROWS; t < tokens && t < (item + 1) * ROWS; ++t) {
            const float* from = qkv + t * ld_qkv;
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

// dq, dk, dv: [tokens, heads, 2 half], each with its own distance between tokens and between heads.
EXPORT void engine_split_rotate_backward(int threads, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t half,
                                         const float* dq, int64_t token_dq, int64_t head_dq, const float* dk,
                                         int64_t token_dk, int64_t head_dk, const float* dv, int64_t token_dv,
                                         int64_t head_dv, const float* cos, const float* sin, float* dqkv,
                                         int64_t ld_dqkv) {
    const int64_t dim = 2 * half;
    common::parallel_for(threads, common::ceil_div(tokens, ROWS), [=](int64_t item) {
        for (int64_t t = item * ROWS; t < tokens && t < (item + 1) * ROWS; ++t) {
            float* to = dqkv + t * ld_dqkv;
            const float *c = cos + t * half, *s = sin + t * half;
            for (int64_t h = 0; h < heads; ++h, to += dim)
                rotate(dq + t * token_dq + h * head_dq, c, s, -1.0f, half, to);
            for (int64_t h = 0; h < kv_heads; ++h, to += dim)
                rotate(dk + t * token_dk + h * head_dk, c, s, -1.0f, half, to);
            for (int64_t h = 0; h < kv_heads; ++h, to += dim) {
                const float* from = dv + t * token_dv + h * head_dv;
                std::copy(from, from + dim, to);
            }
        }
    });
}
