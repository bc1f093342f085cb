// Rows that lie anywhere in a matrix: sums of a token's outputs of its experts, in their order and in fp32, and rows
// that are put there.
#include <algorithm>
#include <cstring>

#include "common.h"
#include "simd.h"

namespace {

constexpr int64_t TOKENS = 4;

template <class T>
void combine(int threads, int64_t tokens, int64_t slots, int64_t features, const T* y, int64_t ld_y,
             const int64_t* rows, const float* weights, T* out) {
    common::parallel_for(threads, common::ceil_div(tokens, TOKENS), [=](int64_t item) {
        for (int64_t t = item * TOKENS; t < std::min(tokens, (item + 1) * TOKENS); ++t)
            simd::for_each(features, [=](auto, int64_t f, int64_t count) {
                simd::Float total = {};
                for (int64_t k = t * slots; k < (t + 1) * slots; ++k) {
                    const simd::Float part = simd::load_up_to(y + rows[k] * ld_y + f, count);
                    total += weights ? part * weights[k] : part;
                }
                simd::store_up_to(out + t * features + f, total, count);
            });
    });
}

}  // namespace

// out[t] = sum of w[t, k] y[rows[t, k]]; `weights` may be null, for ones.
EXPORT void engine_combine_rows(int threads, int type, int64_t tokens, int64_t slots, int64_t features, const void* y,
                                int64_t ld_y, const int64_t* rows, const float* weights, void* out) {
    simd::with_type(type, [=](auto zero) {
        using T = decltype(zero);
        combine(threads, tokens, slots, features, (const T*)y, ld_y, rows, weights, (T*)out);
    });
}
REPLAYED(engine_combine_rows)

// target[places[i]] = source[i]; rows of `bytes` bytes without gaps, places of different rows differ.
EXPORT void engine_put_rows(int, int64_t count, int64_t bytes, const void* source, const int64_t* places,
                            void* target) {
    for (int64_t i = 0; i < count; ++i)
        memcpy((char*)target + places[i] * bytes, (const char*)source + i * bytes, bytes);
}
REPLAYED(engine_put_rows)
