// Vectors of floats as wide as the instruction set that this file is compiled for.
//
// GCC and Clang vector types, so that one source serves AVX-512, AVX2 and the baseline of any machine; intrinsics only
// where the compiler does not find the instruction. Every library is compiled for one instruction set as a whole:
// nothing here is shared between sets, so no linker can pick a function that the processor does not have.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define SIMD_AVX512 1
#define SIMD_LANES 16
#include <immintrin.h>
#elif defined(__AVX2__)
#define SIMD_AVX2 1
#define SIMD_LANES 8
#include <immintrin.h>
#else
#define SIMD_LANES 4
#endif

#define SIMD_INLINE inline __attribute__((always_inline))

namespace simd {

constexpr int LANES = SIMD_LANES;

typedef float Float __attribute__((vector_size(SIMD_LANES * 4)));
typedef int32_t Int __attribute__((vector_size(SIMD_LANES * 4)));

SIMD_INLINE Float splat(float value) { return value - Float{}; }

SIMD_INLINE Float load(const float* from) {
    Float value;
    memcpy(&value, from, sizeof value);
    return value;
}

SIMD_INLINE void store(float* to, Float value) { memcpy(to, &value, sizeof value); }

// The first `count` lanes; the others read as 0 and are not written. 0 <= count <= LANES.
SIMD_INLINE Float load_part(const float* from, int64_t count) {
#if SIMD_AVX512
    return (Float)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
#else
    float lanes[LANES] = {};
    for (int64_t i = 0; i < count; ++i) lanes[i] = from[i];
    return load(lanes);
#endif
}

SIMD_INLINE void store_part(float* to, Float value, int64_t count) {
#if SIMD_AVX512
    _mm512_mask_storeu_ps(to, (__mmask16)((1u << count) - 1), (__m512)value);
#else
    float lanes[LANES];
    store(lanes, value);
    for (int64_t i = 0; i < count; ++i) to[i] = lanes[i];
#endif
}

// Full or partial, as `count` says: a loop's tail without a second loop body.
SIMD_INLINE Float load_up_to(const float* from, int64_t count) {
    return count >= LANES ? load(from) : load_part(from, count);
}

SIMD_INLINE void store_up_to(float* to, Float value, int64_t count) {
    if (count >= LANES) store(to, value);
    else store_part(to, value, count);
}

// Calls body(which, offset, count) for each vector of `size` elements: `which` is 0, 1, 2, 3, 0, ... as a constant, so
// that four independent sums stay in registers; `count` is LANES, known to the compiler, but for the last vector.
template <class Body>
SIMD_INLINE void for_each(int64_t size, Body body) {
    int64_t offset = 0;
    for (; offset + 4 * LANES <= size; offset += 4 * LANES) {
        body(std::integral_constant<int, 0>(), offset, LANES);
        body(std::integral_constant<int, 1>(), offset + LANES, LANES);
        body(std::integral_constant<int, 2>(), offset + 2 * LANES, LANES);
        body(std::integral_constant<int, 3>(), offset + 3 * LANES, LANES);
    }
    for (; offset < size; offset += LANES)
        body(std::integral_constant<int, 0>(), offset, size - offset < LANES ? size - offset : (int64_t)LANES);
}

// Lane i where bit i of the bit string is 1, else 0. `column` counts bits and is a multiple of LANES (of 8 where LANES
// is 4: `column` may then lie in the middle of a byte).
SIMD_INLINE Float keep_lanes(Float value, const uint8_t* bits, int64_t column) {
#if SIMD_AVX512
    uint16_t word;
    memcpy(&word, bits + (column >> 3), sizeof word);
    return (Float)_mm512_maskz_mov_ps(word, (__m512)value);
#else
    const int word = bits[column >> 3] >> (column & 7);
#if SIMD_AVX2
    const Int lane_bit = {1, 2, 4, 8, 16, 32, 64, 128};
#else
    const Int lane_bit = {1, 2, 4, 8};
#endif
    const Int kept = (word & lane_bit) != 0;
    return (Float)(kept & (Int)value);
#endif
}

// In lanes order, pairwise: the same on every call.
SIMD_INLINE float sum(Float value) {
    float lanes[LANES];
    store(lanes, value);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    return lanes[0];
}

SIMD_INLINE Float sqrt(Float value) {
#if SIMD_AVX512
    return (Float)_mm512_sqrt_ps((__m512)value);
#elif SIMD_AVX2
    return (Float)_mm256_sqrt_ps((__m256)value);
#else
    for (int i = 0; i < LANES; ++i) value[i] = std::sqrt(value[i]);
    return value;
#endif
}

// e^x, error below 1 ulp: x = n ln 2 + r, a polynomial in r (Cephes expf), times 2^n in two factors so that results
// under 2^-126 round gradually. exp(-inf) = 0, exp(inf) = inf, NaN stays NaN.
SIMD_INLINE Float exp(Float x) {
    x = x < -104.0f ? splat(-104.0f) : x;
    x = x > 89.0f ? splat(89.0f) : x;
    const Float magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Float shifted = x * 1.44269504088896341f + magic;
    const Float n = shifted - magic;
    const Float r = x - n * 0.693359375f - n * -2.12194440e-4f;
    Float p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
#if SIMD_AVX512
    return (Float)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    const Int whole = (Int)shifted - (Int)magic;
    const Int half = whole >> 1;
    return p * (Float)((half + 127) << 23) * (Float)((whole - half + 127) << 23);
#endif
}

SIMD_INLINE Float sigmoid(Float x) { return 1.0f / (1.0f + exp(-x)); }

}  // namespace simd
