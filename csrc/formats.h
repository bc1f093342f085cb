// Weights in the formats in which vendors ship them, as engine/kernels/formats.py describes their parts: what codes and
// scales are worth, and the numbers of a row. Bits are those of engine/kernels/reference_formats.py.
#pragma once

#include <algorithm>

#include "common.h"
#include "simd.h"

namespace formats {

using simd::Bf16;
using simd::Float;
using simd::HalfWord;
using simd::Int;
using simd::LANES;
using simd::Word;

typedef uint8_t Byte __attribute__((vector_size(LANES)));

// As engine/kernels/native/formats.py numbers them.
enum Codes { E2M1, INT4, E4M3, INT8 };
// fp32, bf16 or fp16; e4m3 that the tensor's scale multiplies or divides; exponents of 2, of
// which a block gets the largest with which its numbers reach the upper codes, or the smallest with which all have one.
enum Scales { SINGLE, BRAIN, HALF, TIMES_TENSOR, OVER_TENSOR, EXPONENT, EXPONENT_ABOVE };

// Rows of codes with their scales. Distances between rows are in elements, which are bytes for codes.
struct Matrix {
    int64_t rows, columns;
    const uint8_t* codes;
    int64_t ld_codes;
    int scale_type;
    const void* scales;
    int64_t ld_scales;
    int64_t joint, granule, group;  // rows that share scales, rows to a row of them, columns that share one
    const float* tensor_scale;      // one a row; null where there is none
    const uint8_t* zeros;           // one to a scale; null where there are none
    int64_t ld_zeros;
    bool keeps_scales;  // whatever the new numbers are, if they are finite

    int64_t groups() const { return common::ceil_div(columns, group); }
};

constexpr float E2M1_VALUES[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
constexpr float WHOLE[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr int INT4_ZERO = 8;  // of symmetric codes

SIMD_INLINE Int widen(Byte bytes) {
#if SIMD_AVX512
    return (Int)_mm512_maskz_cvtepu8_epi32((__mmask16)0xFFFF, (__m128i)bytes);
#elif SIMD_AVX2
    return (Int)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)&bytes));
#else
    return __builtin_convertvector(bytes, Int);
#endif
}

SIMD_INLINE Byte load_bytes(const uint8_t* from, int64_t count) {
    Byte bytes = {};
    if (count >= LANES) memcpy(&bytes, from, sizeof bytes);
    else memcpy(&bytes, from, count);
    return bytes;
}

// e4m3 has exponents from -6; below, numbers are multiples of 2^-9: a mantissa at exponent -6 less its leading one.
SIMD_INLINE Float from_e4m3(Byte bytes) {
#if SIMD_AVX512
    // as fp16, whose exponents are 8 less and whose mantissa is 7 bits longer
    const __m256i size = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16((__m128i)bytes), 7),
                                          _mm256_set1_epi16((int16_t)0xBF80));
    const __mmask16 none = _mm_cmpeq_epi8_mask(_mm_or_si128((__m128i)bytes, _mm_set1_epi8(-128)), _mm_set1_epi8(-1));
    const __m256i marked = _mm256_mask_mov_epi16(size, none, _mm256_set1_epi16(0x7E00));
    return (Float)_mm512_maskz_cvtph_ps((__mmask16)0xFFFF, marked) * 256.0f;
#else
    const Int code = widen(bytes), size = code & 0x7F;
    const Int small = size < 8, none = size == 0x7F;
    const Int leading = small & (121 << 23);
    const Float value = (Float)(((size << 20) + (120 << 23)) + (small & (1 << 23))) - (Float)leading;
    return (Float)((Int)value | (code & 0x80) << 24 | (none & 0x7FC00000));
#endif
}

SIMD_INLINE float exponent_value(uint8_t code) {
    const uint32_t bits = code == 0 ? 0x00400000u : code == 255 ? 0x7FC00000u : (uint32_t)code << 23;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

SIMD_INLINE float half_value(uint16_t code) {
    const bool infinite = (code & 0x7C00) == 0x7C00;  // or NaN; exponents are 112 less than those of fp32
    const uint32_t bits = infinite ? 0x7F800000u | (uint32_t)(code & 0x3FF) << 13 : (uint32_t)(code & 0x7FFF) << 13;
    float value;
    memcpy(&value, &bits, sizeof value);
    value *= infinite ? 1.0f : 0x1p112f;
    return code & 0x8000 ? -value : value;
}

// The scales of a row in fp32: [groups].
inline void row_scales(const Matrix& of, int64_t row, float* to) {
    const int64_t groups = of.groups(), first = row / of.granule * of.ld_scales;
    if (of.scale_type == SINGLE) {
        memcpy(to, (const float*)of.scales + first, groups * sizeof *to);
    } else if (of.scale_type == BRAIN) {
        simd::widen_rows((const Bf16*)of.scales + first, 0, 1, groups, to, 0);
    } else if (of.scale_type == HALF) {
        const auto* from = (const uint16_t*)of.scales + first;
        for (int64_t i = 0; i < groups; ++i) to[i] = half_value(from[i]);
    } else if (of.scale_type >= EXPONENT) {
        const auto* from = (const uint8_t*)of.scales + first;
        for (int64_t i = 0; i < groups; ++i) to[i] = exponent_value(from[i]);
    } else {
        const auto* from = (const uint8_t*)of.scales + first;
        const float whole = of.tensor_scale[row];
        const bool over = of.scale_type == OVER_TENSOR;
        simd::for_each(groups, [=](auto, int64_t i, int64_t count) {
            const Float value = from_e4m3(load_bytes(from + i, count));
            simd::store_up_to(to + i, over ? value / whole : value * whole, count);
        });
    }
}

SIMD_INLINE uint8_t zero_point(const Matrix& of, int64_t row, int64_t group) {
    return of.zeros ? of.zeros[row * of.ld_zeros + group] : INT4_ZERO;
}

// The values of the sixteen codes of a group of 4-bit codes.
struct Table {
    Float part[16 / LANES];

    template <int CODES>
    static SIMD_INLINE Table of(float scale, int zero) {
        Table table;
        for (int i = 0; i < 16 / LANES; ++i) {
            const Float values = simd::load((CODES == E2M1 ? E2M1_VALUES : WHOLE) + i * LANES);
            table.part[i] = (CODES == E2M1 ? values : values - (float)zero) * scale;
        }
        return table;
    }

    // LANES numbers: the codes of LANES / 2 bytes, the lower half of a byte first.
    SIMD_INLINE Float at(const uint8_t* codes) const {
#if SIMD_AVX512
        int64_t eight;
        memcpy(&eight, codes, sizeof eight);
        constexpr Int PLACES = {0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7};
        constexpr Word HALVES = {0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4};
        const __m512i bytes = _mm512_shuffle_epi8(_mm512_set1_epi64(eight), (__m512i)PLACES);
        const __mmask16 all = 0xFFFF;  // with a mask, GCC 12 does not take its own header for a read of nothing
        // a permutation reads four bits
        return (Float)_mm512_maskz_permutexvar_ps(all, (__m512i)((Word)bytes >> HALVES), (__m512)part[0]);
#elif SIMD_AVX2
        int32_t four;
        memcpy(&four, codes, sizeof four);
        constexpr Int PLACES = {0, 0, 1, 1, 2, 2, 3, 3};
        constexpr Word HALVES = {0, 4, 0, 4, 0, 4, 0, 4};
        const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(four), (__m256i)PLACES);
        const __m256i index = (__m256i)((Word)bytes >> HALVES);
        const __m256 lower = _mm256_permutevar8x32_ps((__m256)part[0], index);
        const __m256 upper = _mm256_permutevar8x32_ps((__m256)part[1], index);
        return (Float)_mm256_blendv_ps(lower, upper, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
#else
        Float value;
        for (int i = 0; i < LANES; ++i) {
            const int code = i % 2 ? codes[i / 2] >> 4 : codes[i / 2] & 15;
            value[i] = part[code / LANES][code % LANES];
        }
        return value;
#endif
    }

    SIMD_INLINE Float part_at(const uint8_t* codes, int64_t count) const {
        uint8_t rest[LANES / 2] = {};
        memcpy(rest, codes, common::ceil_div(count, 2));
        return at(rest);
    }
};

template <int CODES>
SIMD_INLINE Float from_byte(Byte bytes) {
    if (CODES == E4M3) return from_e4m3(bytes);
#if SIMD_AVX512
    const __mmask16 all = 0xFFFF;
    return (Float)_mm512_maskz_cvtepi32_ps(all, _mm512_maskz_cvtepi8_epi32(all, (__m128i)bytes));
#elif SIMD_AVX2
    return (Float)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)&bytes)));
#else
    typedef int8_t Signed __attribute__((vector_size(LANES)));
    return __builtin_convertvector(__builtin_convertvector((Signed)bytes, Int), Float);
#endif
}

#if SIMD_AVX512
// As many numbers as have whole vectors, found in a table that is rounded before; returns their number.
SIMD_INLINE int64_t store_bf16(const Table& table, const uint8_t* codes, int64_t size, Bf16* to) {
    const __m256i half = (__m256i)simd::narrow(table.part[0]);
    const __m512i twice = _mm512_maskz_broadcast_i64x4(0xFF, half);  // so that five bits will do
    int64_t i = 0;
    for (; i + 32 <= size; i += 32) {
        const __m512i bytes = _mm512_maskz_cvtepu8_epi32(0xFFFF, _mm_loadu_si128((const __m128i*)(codes + i / 2)));
        const Int index = (Int)bytes | (Int)bytes << 12;
        _mm512_storeu_si512(to + i, _mm512_maskz_permutexvar_epi16(~0u, (__m512i)index, twice));
    }
    if (i + 16 <= size) {
        const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(codes + i / 2)));
        const __m256i index = _mm256_or_si256(bytes, _mm256_slli_epi32(bytes, 12));
        _mm256_storeu_si256((__m256i*)(to + i), _mm256_permutexvar_epi16(index, half));
        i += 16;
    }
    return i;
}
#endif

// Numbers of a group of one row: `size` of them, from codes whose first is the group's first.
template <int CODES, class T>
SIMD_INLINE void decode_group(const uint8_t* codes, int64_t size, float scale, int zero, T* to) {
    int64_t i = 0;
    if constexpr (CODES == E2M1 || CODES == INT4) {
        const Table table = Table::of<CODES>(scale, zero);
#if SIMD_AVX512
        if constexpr (std::is_same<T, Bf16>::value) i = store_bf16(table, codes, size, to);
#endif
        for (; i + LANES <= size; i += LANES) simd::store(to + i, table.at(codes + i / 2));
        if (i < size) simd::store_part(to + i, table.part_at(codes + i / 2, size - i), size - i);
    } else {
        for (; i + LANES <= size; i += LANES)
            simd::store(to + i, from_byte<CODES>(load_bytes(codes + i, LANES)) * scale);
        if (i < size)
            simd::store_part(to + i, from_byte<CODES>(load_bytes(codes + i, size - i)) * scale, size - i);
    }
}

// Numbers of one row, of the groups from first_group on, as many as `columns` reach.
template <int CODES, class T>
inline void decode_row(const Matrix& of, int64_t row, const float* scales, int64_t first_group, int64_t columns,
                       T* to) {
    constexpr int PACKED = CODES == E2M1 || CODES == INT4 ? 2 : 1;
    const uint8_t* codes = of.codes + row * of.ld_codes + first_group * of.group / PACKED;
    if (CODES == E2M1 && of.group == 16 && LANES == 16) {  // one vector, known to the compiler
        int64_t c = 0;
        for (const float* scale = scales + first_group; c + LANES <= columns; c += LANES, ++scale)
            decode_group<E2M1>(codes + c / PACKED, LANES, *scale, 0, to + c);
        codes += c / PACKED, to += c, columns -= c, first_group += c / LANES;
    }
    for (int64_t c = 0, g = first_group; c < columns; c += of.group, ++g)
        decode_group<CODES>(codes + c / PACKED, std::min(of.group, columns - c), scales[g],
                            CODES == INT4 ? zero_point(of, row, g) : 0, to + c);
}

// Calls work with the kind of codes as a constant.
template <class Work>
inline void with_codes(int codes, Work work) {
    if (codes == E2M1) work(std::integral_constant<int, E2M1>());
    else if (codes == INT4) work(std::integral_constant<int, INT4>());
    else if (codes == E4M3) work(std::integral_constant<int, E4M3>());
    else work(std::integral_constant<int, INT8>());
}

}  // namespace formats
