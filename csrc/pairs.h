// Products of bfloat16 matrices, summed in fp32, of which one dimension is the small rank of an adapter: by the
// instruction of AVX512-BF16 that multiplies pairs of them.
//
// `found` says at run time whether the processor has it. A left operand is row-major, a right one has pairs of rows
// interleaved, as for AMX tiles (amx.h): word (k / 2, n) holds b[k, n] below b[k + 1, n]. The instruction takes numbers
// below 2^-126 for 0, as does `narrow`. The order in which an element's products are added depends on k only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#include "common.h"
#include "simd.h"

#if SIMD_AVX512 && defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HAS_PAIRS 1
#include <cpuid.h>
#endif

#if HAS_PAIRS

namespace pairs {

using common::ceil_div;
using simd::Bf16;
using simd::Float;
using simd::LANES;

constexpr int64_t STEP = 32;  // numbers of a vector: right operands are padded to it in depth

inline int64_t padded(int64_t size, int64_t step = STEP) { return ceil_div(size, step) * step; }

inline bool ask() {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}

inline bool found() {
    static const bool has = ask();
    return has;
}

// sum + the products of the pairs in each lane. By name: the intrinsic would want this file compiled for it.
SIMD_INLINE Float add_products(Float sum, Float left, Float right) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(left), "v"(right));
    return sum;
}

// To the nearest, ties to even.
SIMD_INLINE __m256i narrow(Float value) {
    __m256i half;
    asm("vcvtneps2bf16 %1, %0" : "=v"(half) : "v"(value));
    return half;
}

SIMD_INLINE void put(Bf16* to, Float value) { _mm256_storeu_si256((__m256i*)to, narrow(value)); }

SIMD_INLINE void put(float* to, Float value) { simd::store(to, value); }

// The first `count` lanes, at least one of them.
SIMD_INLINE void put_up_to(Bf16* to, Float value, int64_t count) {
    if (count >= LANES) put(to, value);
    else _mm256_mask_storeu_epi16(to, (__mmask16)((1u << count) - 1), narrow(value));
}

SIMD_INLINE void put_up_to(float* to, Float value, int64_t count) { simd::store_up_to(to, value, count); }

// finish(row, column, sum) takes a vector of the product.
template <int ROWS, int VECTORS, class Finish>
SIMD_INLINE void tile(int64_t row, int64_t column, int64_t depth, const Bf16* left, int64_t ld_left,
                      const uint32_t* right, int64_t ld_right, const Finish& finish) {
    Float sums[ROWS][VECTORS] = {};
    left += row * ld_left;
    right += column;
    for (int64_t k = 0; k < depth; k += 2, right += ld_right) {
        Float operand[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) operand[v] = simd::load((const float*)right + v * LANES);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; ++i) {
            int32_t pair;
            memcpy(&pair, left + i * ld_left + k, sizeof pair);
            const Float factors = (Float)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) sums[i][v] = add_products(sums[i][v], factors, operand[v]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) finish(row + i, column + v * LANES, sums[i][v]);
}

template <int MOST, int VECTORS, class Finish>
SIMD_INLINE void tile_rows(int64_t rows, int64_t column, int64_t depth, const Bf16* left, int64_t ld_left,
                           const uint32_t* right, int64_t ld_right, const Finish& finish) {
    int64_t row = 0;
    for (; row + MOST <= rows; row += MOST)
        tile<MOST, VECTORS>(row, column, depth, left, ld_left, right, ld_right, finish);
    for (; row + 4 <= rows; row += 4)
        tile<4, VECTORS>(row, column, depth, left, ld_left, right, ld_right, finish);
    for (; row < rows; ++row) tile<1, VECTORS>(row, column, depth, left, ld_left, right, ld_right, finish);
}

// left [rows, depth] right [depth, columns]; depth is even, columns a multiple of LANES.
template <class Finish>
SIMD_INLINE void product(int64_t rows, int64_t columns, int64_t depth, const Bf16* left, int64_t ld_left,
                         const uint32_t* right, int64_t ld_right, const Finish& finish) {
    for (int64_t column = 0; column < columns;) {
        const int64_t vectors = (columns - column) / LANES;
        // four vectors left go as two and two: one alone has too few sums to hide its latency
        if (vectors == 4 || vectors == 2) {
            tile_rows<8, 2>(rows, column, depth, left, ld_left, right, ld_right, finish);
            column += 2 * LANES;
        } else if (vectors >= 3) {
            tile_rows<8, 3>(rows, column, depth, left, ld_left, right, ld_right, finish);
            column += 3 * LANES;
        } else {
            tile_rows<16, 1>(rows, column, depth, left, ld_left, right, ld_right, finish);
            column += LANES;
        }
    }
}

// out [rows, columns] += the product.
inline void add_product(int64_t rows, int64_t columns, int64_t depth, const Bf16* left, int64_t ld_left,
                        const uint32_t* right, int64_t ld_right, float* out, int64_t ld_out) {
    product(rows, columns, depth, left, ld_left, right, ld_right, [=](int64_t i, int64_t j, Float sum) {
        float* to = out + i * ld_out + j;
        simd::store(to, simd::load(to) + sum);
    });
}

SIMD_INLINE __mmask32 first_of(int64_t count) {
    return count >= STEP ? ~(__mmask32)0 : (__mmask32)(((uint64_t)1 << count) - 1);
}

// The mask of `count` elements from `column` on, a multiple of 8: those whose bit is 1, or all where there are no bits.
SIMD_INLINE __mmask32 kept(const uint8_t* bits, int64_t column, int64_t count) {
    uint32_t word = ~0u;
    if (bits) memcpy(&word, bits + (column >> 3), std::min<int64_t>(4, ceil_div(count, 8)));
    return word & first_of(count);
}

// Asks for what lies at an address soon to be read, for the second cache.
template <class T>
SIMD_INLINE void fetch(const T* address) {
    __builtin_prefetch(address, 0, 2);
}

// Rows as they are, or 0 where the bit is 0, in `to` [rows, padded(columns)].
inline void copy_rows(int64_t rows, int64_t columns, const Bf16* from, int64_t ld, const uint8_t* bits, int64_t ld_bits,
                      Bf16* to, int64_t ld_to) {
    for (int64_t row = 0; row < rows; ++row, from += ld, to += ld_to, bits += bits ? ld_bits : 0)
        for (int64_t c = 0; c < columns; c += STEP)
            _mm512_storeu_si512(to + c, _mm512_maskz_loadu_epi16(kept(bits, c, columns - c), from + c));
}

// Rows as a right operand, with zeros beyond them: `to` [padded(rows) / 2, padded(columns)] words. Elements whose bit is
// 0 count as 0. The rows that are read next lie `next` elements behind these.
inline void interleave(int64_t rows, int64_t columns, const Bf16* from, int64_t ld, const uint8_t* bits,
                       int64_t ld_bits, uint32_t* to, int64_t ld_to, int64_t next = 0) {
    alignas(64) uint16_t order[2 * STEP];
    for (int i = 0; i < STEP; ++i) {
        order[i] = (uint16_t)(i / 2 + i % 2 * STEP);
        order[STEP + i] = (uint16_t)(order[i] + STEP / 2);
    }
    const __m512i low = _mm512_load_si512(order), high = _mm512_load_si512(order + STEP);
    for (int64_t row = 0; row < padded(rows); row += 2, to += ld_to) {
        const Bf16* even = from + row * ld;
        const uint8_t* bits_of_even = bits ? bits + row * ld_bits : nullptr;
        for (int64_t c = 0; c < columns; c += STEP) {
            const __mmask32 first = row < rows ? kept(bits_of_even, c, columns - c) : 0;
            const __mmask32 second =
                row + 1 < rows ? kept(bits ? bits_of_even + ld_bits : nullptr, c, columns - c) : 0;
            const __m512i a = _mm512_maskz_loadu_epi16(first, even + c);
            const __m512i b = _mm512_maskz_loadu_epi16(second, even + ld + c);
            fetch(even + c + next);
            fetch(even + ld + c + next);
            _mm512_storeu_si512(to + c, _mm512_permutex2var_epi16(a, low, b));
            _mm512_storeu_si512(to + c + LANES, _mm512_permutex2var_epi16(a, high, b));
        }
    }
}

// The transpose of a matrix [rows, columns] as a right operand, with zeros beyond it: `to` [padded(columns) / 2, width]
// words, for width = padded(rows, LANES) or more.
inline void interleave_transposed(int64_t rows, int64_t columns, const Bf16* from, int64_t ld, uint32_t* to,
                                  int64_t width) {
    for (int64_t row = 0; row < width; row += LANES)
        for (int64_t c = 0; c < columns; c += STEP) {
            Float square[LANES];
            for (int64_t i = 0; i < LANES; ++i) {
                const __mmask32 some = row + i < rows ? first_of(columns - c) : 0;
                square[i] = (Float)_mm512_maskz_loadu_epi16(some, from + (row + i) * ld + c);
            }
            simd::transpose(square);
            for (int64_t i = 0; i < LANES; ++i) simd::store((float*)to + (c / 2 + i) * width + row, square[i]);
        }
}

// The transpose of a narrow matrix [rows, columns] as a left operand, [columns, rows] with zeros beyond it; its rows are
// times `scale` where given, rounded once more.
class Transposed {
  public:
    Transposed(int threads, int64_t rows, int64_t columns, const Bf16* from, int64_t ld_from,
               const float* scale = nullptr)
        : ld(padded(rows) + STEP) {
        const int64_t height = padded(columns, LANES);
        memory_.reset(new Bf16[(size_t)(height * ld)]);
        data = memory_.get();
        Bf16* to = memory_.get();
        common::parallel_for(threads, ceil_div(rows, STEP), [=](int64_t item) {
            const int64_t row = item * STEP, last = std::min(rows, row + STEP);
            for (int64_t c = 0; c < columns; c += LANES) {
                const __mmask16 some = (__mmask16)first_of(std::min<int64_t>(LANES, columns - c));
                Float square[LANES];
                for (int64_t i = 0; i < LANES; ++i) {
                    const int64_t even = row + 2 * i;
                    const __m512i a = half(from + even * ld_from + c, even < last ? some : 0, scale, even);
                    const __m512i b = half(from + (even + 1) * ld_from + c, even + 1 < last ? some : 0, scale, even + 1);
                    square[i] = (Float)_mm512_or_si512(a, _mm512_slli_epi32(b, 16));
                }
                simd::transpose(square);
                for (int64_t i = 0; i < LANES; ++i) simd::store((float*)(to + (c + i) * ld + row), square[i]);
            }
        });
    }
    const Bf16* data;
    int64_t ld;

  private:
    SIMD_INLINE static __m512i half(const Bf16* from, __mmask16 some, const float* scale, int64_t row) {
        const __m512i words = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, from));
        if (!scale || !some) return words;
        return _mm512_cvtepu16_epi32(narrow((Float)_mm512_slli_epi32(words, 16) * scale[row]));
    }

    std::unique_ptr<Bf16[]> memory_;
};

// A matrix in panels of right operands, each contiguous and padded with zeros: [panels][padded(rows) / 2][PANEL] words.
constexpr int64_t PANEL = 96;

class Panels {
  public:
    Panels(int threads, int64_t rows, int64_t columns, const Bf16* data, int64_t ld) : size_(padded(rows) / 2 * PANEL) {
        const int64_t panels = ceil_div(columns, PANEL);
        memory_.reset(new uint32_t[(size_t)(panels * size_)]);
        uint32_t* to = memory_.get();
        common::parallel_for(threads, panels, [=](int64_t p) {
            const int64_t first = p * PANEL, count = std::min(PANEL, columns - first);
            interleave(rows, count, data + first, ld, nullptr, 0, to + p * size_, PANEL);
        });
    }
    // The panel that begins at `column`, a multiple of PANEL.
    const uint32_t* panel(int64_t column) const { return memory_.get() + column / PANEL * size_; }

  private:
    int64_t size_;
    std::unique_ptr<uint32_t[]> memory_;
};

}  // namespace pairs

#endif
