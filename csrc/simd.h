// Vectors of floats as wide as the instruction set that this file is compiled for, loaded from and stored to fp32 or
// bfloat16: arithmetic is fp32 in both cases, and a store rounds once, to the nearest even.
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

typedef uint32_t Word __attribute__((vector_size(SIMD_LANES * 4)));
typedef uint16_t HalfWord __attribute__((vector_size(SIMD_LANES * 2)));

// The high half of a float.
struct Bf16 {
    uint16_t bits;
};

SIMD_INLINE Float splat(float value) { return value - Float{}; }

// A product as it is rounded to float. The compiler may not carry it into an addition unrounded (a fused multiply-add),
// so that equal products are equal wherever they are computed: x * scale - max(x) * scale is 0 for the largest x.
SIMD_INLINE Float rounded(Float product) {
#if SIMD_AVX512
    asm("" : "+v"(product));
#elif defined(__x86_64__)
    asm("" : "+x"(product));
#elif defined(__aarch64__)
    asm("" : "+w"(product));
#endif
    return product;
}

SIMD_INLINE Float load(const float* from) {
    Float value;
    memcpy(&value, from, sizeof value);
    return value;
}

SIMD_INLINE void store(float* to, Float value) { memcpy(to, &value, sizeof value); }

SIMD_INLINE Float widen(HalfWord value) { return (Float)(__builtin_convertvector(value, Word) << 16); }

// To the nearest, ties to even; overflow gives infinity, NaN stays NaN.
SIMD_INLINE HalfWord narrow(Float value) {
    const Word bits = (Word)value;
    const Word rounded = value == value ? bits + 0x7FFFu + (bits >> 16 & 1u) : bits | 0x400000u;
    return __builtin_convertvector(rounded >> 16, HalfWord);
}

SIMD_INLINE Float load(const Bf16* from) {
    HalfWord value;
    memcpy(&value, from, sizeof value);
    return widen(value);
}

SIMD_INLINE void store(Bf16* to, Float value) {
    const HalfWord half = narrow(value);
    memcpy(to, &half, sizeof half);
}

SIMD_INLINE float to_float(float value) { return value; }

SIMD_INLINE float to_float(Bf16 value) {
    const uint32_t bits = (uint32_t)value.bits << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

SIMD_INLINE void store_one(float* to, float value) { *to = value; }

SIMD_INLINE void store_one(Bf16* to, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    to->bits = (uint16_t)((value == value ? bits + 0x7FFFu + (bits >> 16 & 1u) : bits | 0x400000u) >> 16);
}

// What a launcher calls a type: 0 is float, 1 is Bf16. Calls work with a value of it.
template <class Work>
inline void with_type(int type, Work work) {
    if (type == 1) work(Bf16());
    else work(float());
}

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

SIMD_INLINE Float load_part(const Bf16* from, int64_t count) {
#if SIMD_AVX512
    return widen((HalfWord)_mm256_maskz_loadu_epi16((__mmask16)((1u << count) - 1), from));
#else
    Bf16 lanes[LANES] = {};
    for (int64_t i = 0; i < count; ++i) lanes[i] = from[i];
    return load(lanes);
#endif
}

SIMD_INLINE void store_part(Bf16* to, Float value, int64_t count) {
#if SIMD_AVX512
    _mm256_mask_storeu_epi16(to, (__mmask16)((1u << count) - 1), (__m256i)narrow(value));
#else
    Bf16 lanes[LANES];
    store(lanes, value);
    for (int64_t i = 0; i < count; ++i) to[i] = lanes[i];
#endif
}

// Full or partial, as `count` says: a loop's tail without a second loop body.
template <class T>
SIMD_INLINE Float load_up_to(const T* from, int64_t count) {
    return count >= LANES ? load(from) : load_part(from, count);
}

template <class T>
SIMD_INLINE void store_up_to(T* to, Float value, int64_t count) {
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

// Rows of any type as floats, `ld_to` apart.
template <class T>
inline void widen_rows(const T* from, int64_t ld, int64_t rows, int64_t columns, float* to, int64_t ld_to) {
    for (int64_t row = 0; row < rows; ++row)
        for_each(columns, [=](auto, int64_t column, int64_t count) {
            store_up_to(to + row * ld_to + column, load_up_to(from + row * ld + column, count), count);
        });
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

// The lanes of a and b in turns: a0 b0 a1 b1 ..., of their first halves or of their second halves.
template <bool SECOND>
SIMD_INLINE Float interleave(Float a, Float b) {
#if defined(__clang__)
    Float mixed;
    for (int i = 0; i < LANES; ++i) mixed[i] = (i % 2 ? b : a)[i / 2 + (SECOND ? LANES / 2 : 0)];
    return mixed;
#else
#if SIMD_AVX512
    const Int lanes = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
#elif SIMD_AVX2
    const Int lanes = {0, 8, 1, 9, 2, 10, 3, 11};
#else
    const Int lanes = {0, 4, 1, 5};
#endif
    return __builtin_shuffle(a, b, lanes + (SECOND ? LANES / 2 : 0));
#endif
}

// Rows become columns: interleaving row i with row i + LANES / 2, for all i and log2(LANES) times.
SIMD_INLINE void transpose(Float (&rows)[LANES]) {
    for (int done = 1; done < LANES; done *= 2) {
        Float mixed[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; ++i) {
            mixed[2 * i] = interleave<false>(rows[i], rows[i + LANES / 2]);
            mixed[2 * i + 1] = interleave<true>(rows[i], rows[i + LANES / 2]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i) rows[i] = mixed[i];
    }
}

// In lanes order, pairwise: the same on every call.
SIMD_INLINE float sum(Float value) {
    float lanes[LANES];
    store(lanes, value);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    return lanes[0];
}

// The sum of the lanes of each of N vectors, first lane first. to: [N], with room up to a multiple of LANES.
template <int N>
SIMD_INLINE void lane_sums(const Float (&sums)[N], float* to) {
#pragma GCC unroll 8
    for (int first = 0; first < N; first += LANES) {
        Float square[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i) square[i] = first + i < N ? sums[first + i] : Float{};
        transpose(square);
        Float sum = square[0];
#pragma GCC unroll 16
        for (int i = 1; i < LANES; ++i) sum += square[i];
        store(to + first, sum);
    }
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
