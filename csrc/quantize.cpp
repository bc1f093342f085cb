// Frozen weights as 4-bit NF4 and int8: encoding and decoding. Bits are those of
// engine/kernels/reference_quantize.py; nothing here may be contracted into a fused multiply-add.
//
// Matrices are fp32 or bf16 (`is_bf16`), rows any distance apart, in elements. Codes are dense.
#include <algorithm>

#include "common.h"
#include "simd.h"

namespace {

using simd::Float;
using simd::Int;
using simd::LANES;

typedef uint16_t Short __attribute__((vector_size(LANES * 2)));
typedef int8_t Byte __attribute__((vector_size(LANES)));

constexpr int64_t BLOCK = 64;           // weights of a row that share an NF4 scale
constexpr int64_t GROUP = 256;          // NF4 scales that share a scale
constexpr int64_t ELEMENTS = 1 << 14;   // about as many are one item of work
constexpr float SMALLEST = 1e-38f, SMALLEST_ROW = 1e-30f;

constexpr float VALUES[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};

struct Single {
    typedef float Element;
    static SIMD_INLINE Float load(const float* from, int64_t count) { return simd::load_up_to(from, count); }
    static SIMD_INLINE void store(float* to, Float value, int64_t count) { simd::store_up_to(to, value, count); }
};

struct Half {  // bf16
    typedef uint16_t Element;

    static SIMD_INLINE Float load(const uint16_t* from, int64_t count) {
        Short bits = {};
        if (count >= LANES) memcpy(&bits, from, sizeof bits);
        else memcpy(&bits, from, count * sizeof *from);
        return (Float)(__builtin_convertvector(bits, Int) << 16);
    }

    // Nearest, ties to even; the numbers here are finite.
    static SIMD_INLINE void store(uint16_t* to, Float value, int64_t count) {
        const Int bits = (Int)value;
        const Int shifted = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
#if SIMD_AVX512
        const Short rounded = (Short)_mm512_maskz_cvtepi32_epi16((__mmask16)0xFFFF, (__m512i)shifted);
#else
        const Short rounded = __builtin_convertvector(shifted, Short);
#endif
        if (count >= LANES) memcpy(to, &rounded, sizeof rounded);
        else memcpy(to, &rounded, count * sizeof *to);
    }
};

// Calls work(first_row, last_row) on runs of rows that do not depend on the number of threads.
template <class Work>
void for_rows(int threads, int64_t rows, int64_t columns, Work work) {
    const int64_t run = std::max<int64_t>(1, ELEMENTS / std::max<int64_t>(columns, 1));
    common::parallel_for(threads, common::ceil_div(rows, run), [=](int64_t item) {
        work(item * run, std::min(rows, (item + 1) * run));
    });
}

// As integers, magnitudes sort as the numbers do, infinity after them and NaN last: no NaN is lost.
template <class Type>
float largest_magnitude(const typename Type::Element* from, int64_t size) {
    Int largest[4] = {};
    simd::for_each(size, [&](auto which, int64_t i, int64_t count) {
        const Int magnitude = (Int)Type::load(from + i, count) & 0x7FFFFFFF;
        Int& now = largest[which()];
        now = magnitude > now ? magnitude : now;
    });
    int32_t found = 0;
    for (const Int& part : largest)
        for (int i = 0; i < LANES; ++i) found = std::max(found, (int32_t)part[i]);
    float value;
    memcpy(&value, &found, sizeof value);
    return value;
}

template <class Type>
void block_absmax(int threads, int64_t rows, int64_t columns, int64_t block, const void* weight, int64_t ld,
                  float* absmax) {
    const auto* from = (const typename Type::Element*)weight;
    const int64_t blocks = common::ceil_div(columns, block);
    for_rows(threads, rows, columns, [=](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row)
            for (int64_t b = 0; b < blocks; ++b)
                absmax[row * blocks + b] = largest_magnitude<Type>(from + row * ld + b * block,
                                                                   std::min(block, columns - b * block));
    });
}

// How many of the bounds between table entries lie below each number.
SIMD_INLINE Int nearest(Float value) {
    Int code = {};
    for (int i = 0; i < 15; ++i) code -= value > simd::splat((VALUES[i] + VALUES[i + 1]) / 2);
    return code;
}

template <class Type>
void nf4_codes(int threads, int64_t rows, int64_t columns, const void* weight, int64_t ld, const float* absmax,
               uint8_t* codes) {
    const auto* from = (const typename Type::Element*)weight;
    const int64_t blocks = common::ceil_div(columns, BLOCK), bytes = common::ceil_div(columns, 2);
    for_rows(threads, rows, columns, [=](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row)
            for (int64_t b = 0; b < blocks; ++b) {
                const int64_t size = std::min(BLOCK, columns - b * BLOCK);
                const auto* block = from + row * ld + b * BLOCK;
                const float inverse = 1.0f / std::max(absmax[row * blocks + b], SMALLEST);
                int32_t nibbles[BLOCK];
                std::fill(nibbles, nibbles + BLOCK, 7);  // the code of 0
                for (int64_t i = 0; i < size; i += LANES) {
                    const Int code = nearest(Type::load(block + i, size - i) * inverse);
                    memcpy(nibbles + i, &code, sizeof code);
                }
                uint8_t* to = codes + row * bytes + b * (BLOCK / 2);
                for (int64_t i = 0; i < common::ceil_div(size, 2); ++i)
                    to[i] = (uint8_t)(nibbles[2 * i] << 4 | nibbles[2 * i + 1]);
            }
    });
}

// LANES table entries: the codes of LANES / 2 bytes, the upper half of a byte first.
SIMD_INLINE Float look_up(const float* table, const uint8_t* codes) {
#if SIMD_AVX512
    const __m128i bytes = _mm_loadl_epi64((const __m128i*)codes), low = _mm_set1_epi8(15);
    const __m128i pairs = _mm_unpacklo_epi8(_mm_and_si128(_mm_srli_epi16(bytes, 4), low), _mm_and_si128(bytes, low));
    const __mmask16 all = 0xFFFF;  // with a mask, GCC 12 does not take its own header for a read of nothing
    return (Float)_mm512_maskz_permutexvar_ps(all, _mm512_maskz_cvtepu8_epi32(all, pairs), (__m512)simd::load(table));
#elif SIMD_AVX2
    int32_t four;
    memcpy(&four, codes, sizeof four);
    const __m128i bytes = _mm_cvtsi32_si128(four), low = _mm_set1_epi8(15);
    const __m128i pairs = _mm_unpacklo_epi8(_mm_and_si128(_mm_srli_epi16(bytes, 4), low), _mm_and_si128(bytes, low));
    const __m256i index = _mm256_cvtepu8_epi32(pairs);
    const __m256 lower = _mm256_permutevar8x32_ps((__m256)simd::load(table), index);
    const __m256 upper = _mm256_permutevar8x32_ps((__m256)simd::load(table + 8), index);
    return (Float)_mm256_blendv_ps(lower, upper, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
#else
    Float value;
    for (int i = 0; i < LANES; ++i) value[i] = table[i % 2 ? codes[i / 2] & 15 : codes[i / 2] >> 4];
    return value;
#endif
}

template <class Type>
void nf4_decode(int threads, int64_t rows, int64_t columns, const uint8_t* codes, int64_t ld_codes,
                const uint8_t* scales, int64_t ld_scales, const float* groups, int64_t ld_groups,
                const uint8_t* phase, const float* map, void* out, int64_t ld_out) {
    auto* to = (typename Type::Element*)out;
    const int64_t blocks = common::ceil_div(columns, BLOCK);
    for_rows(threads, rows, columns, [=](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            const float* group = groups + row * ld_groups;
            for (int64_t b = 0; b < blocks; ++b) {
                float product = map[scales[row * ld_scales + b]] * group[1 + (phase[row] + b) / GROUP];
                asm("" : "+m"(product));  // rounded before the sum: no fused multiply-add
                const float scale = product + group[0];
                float table[16];
                for (int i = 0; i < 16; ++i) table[i] = VALUES[i] * scale;
                const int64_t size = std::min(BLOCK, columns - b * BLOCK);
                const uint8_t* from = codes + row * ld_codes + b * (BLOCK / 2);
                auto* block = to + row * ld_out + b * BLOCK;
                int64_t i = 0;
                for (; i + LANES <= size; i += LANES) Type::store(block + i, look_up(table, from + i / 2), LANES);
                if (i < size) {
                    uint8_t rest[LANES / 2] = {};
                    memcpy(rest, from + i / 2, common::ceil_div(size - i, 2));
                    Type::store(block + i, look_up(table, rest), size - i);
                }
            }
        }
    });
}

SIMD_INLINE Int rounded(Float value) {
#if SIMD_AVX512
    return (Int)_mm512_maskz_cvtps_epi32((__mmask16)0xFFFF, (__m512)value);
#elif SIMD_AVX2
    return (Int)_mm256_cvtps_epi32((__m256)value);
#else
    Int whole;
    for (int i = 0; i < LANES; ++i) whole[i] = (int32_t)lrintf(value[i]);
    return whole;
#endif
}

template <class Type>
void int8_codes(int threads, int64_t rows, int64_t columns, const void* weight, int64_t ld, const float* absmax,
                int8_t* codes) {
    const auto* from = (const typename Type::Element*)weight;
    for_rows(threads, rows, columns, [=](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            const float inverse = 127.0f / std::max(absmax[row], SMALLEST_ROW);
            for (int64_t i = 0; i < columns; i += LANES) {
                const int64_t count = std::min<int64_t>(LANES, columns - i);
                Int code = rounded(Type::load(from + row * ld + i, count) * inverse);
                code = code > 127 ? 127 - Int{} : code;
                code = code < -127 ? -127 - Int{} : code;
                const Byte bytes = __builtin_convertvector(code, Byte);
                if (count == LANES) memcpy(codes + row * columns + i, &bytes, sizeof bytes);
                else memcpy(codes + row * columns + i, &bytes, count);
            }
        }
    });
}

SIMD_INLINE Float widened(const int8_t* codes, int64_t count) {
    Byte bytes = {};
    if (count >= LANES) memcpy(&bytes, codes, sizeof bytes);
    else memcpy(&bytes, codes, count);
#if SIMD_AVX512
    const __mmask16 all = 0xFFFF;  // as above
    return (Float)_mm512_maskz_cvtepi32_ps(all, _mm512_maskz_cvtepi8_epi32(all, (__m128i)bytes));
#else
    return __builtin_convertvector(__builtin_convertvector(bytes, Int), Float);
#endif
}

template <class Type>
void int8_decode(int threads, int64_t rows, int64_t columns, const int8_t* codes, int64_t ld_codes,
                 const float* scales, void* out, int64_t ld_out) {
    auto* to = (typename Type::Element*)out;
    for_rows(threads, rows, columns, [=](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            const int8_t* from = codes + row * ld_codes;
            auto* out_row = to + row * ld_out;
            const float scale = scales[row];
            int64_t i = 0;
            for (; i + LANES <= columns; i += LANES) Type::store(out_row + i, widened(from + i, LANES) * scale, LANES);
            if (i < columns) Type::store(out_row + i, widened(from + i, columns - i) * scale, columns - i);
        }
    });
}

}  // namespace

// absmax [rows, ceil(columns / block)] dense; NaN or infinity where the block has such a number.
EXPORT void engine_block_absmax(int threads, int64_t rows, int64_t columns, int64_t block, int is_bf16,
                                const void* weight, int64_t ld, float* absmax) {
    if (is_bf16) block_absmax<Half>(threads, rows, columns, block, weight, ld, absmax);
    else block_absmax<Single>(threads, rows, columns, block, weight, ld, absmax);
}

// codes [rows, ceil(columns / 2)] dense. The weights are finite.
EXPORT void engine_nf4_codes(int threads, int64_t rows, int64_t columns, int is_bf16, const void* weight, int64_t ld,
                             const float* absmax, uint8_t* codes) {
    if (is_bf16) nf4_codes<Half>(threads, rows, columns, weight, ld, absmax, codes);
    else nf4_codes<Single>(threads, rows, columns, weight, ld, absmax, codes);
}

// groups [rows, 1 + g]: the offset, then the scales of the groups that the row touches, from the one its first block
// lies in, at place phase[row] of it. map [256] is what the codes of scales mean.
EXPORT void engine_nf4_decode(int threads, int64_t rows, int64_t columns, const uint8_t* codes, int64_t ld_codes,
                              const uint8_t* scales, int64_t ld_scales, const float* groups, int64_t ld_groups,
                              const uint8_t* phase, const float* map, int is_bf16, void* out, int64_t ld_out) {
    if (is_bf16)
        nf4_decode<Half>(threads, rows, columns, codes, ld_codes, scales, ld_scales, groups, ld_groups, phase, map,
                         out, ld_out);
    else
        nf4_decode<Single>(threads, rows, columns, codes, ld_codes, scales, ld_scales, groups, ld_groups, phase, map,
                           out, ld_out);
}
REPLAYED(engine_nf4_decode)

// codes [rows, columns] dense; absmax [rows]. The weights are finite.
EXPORT void engine_int8_codes(int threads, int64_t rows, int64_t columns, int is_bf16, const void* weight, int64_t ld,
                              const float* absmax, int8_t* codes) {
    if (is_bf16) int8_codes<Half>(threads, rows, columns, weight, ld, absmax, codes);
    else int8_codes<Single>(threads, rows, columns, weight, ld, absmax, codes);
}

EXPORT void engine_int8_decode(int threads, int64_t rows, int64_t columns, const int8_t* codes, int64_t ld_codes,
                               const float* scales, int is_bf16, void* out, int64_t ld_out) {
    if (is_bf16) int8_decode<Half>(threads, rows, columns, codes, ld_codes, scales, out, ld_out);
    else int8_decode<Single>(threads, rows, columns, codes, ld_codes, scales, out, ld_out);
}
REPLAYED(engine_int8_decode)
