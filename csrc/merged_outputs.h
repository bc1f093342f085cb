// Where merged weights go: as numbers, or as codes and scales into the parts of the matrix that they are made from.
// Rows and columns are the matrix's; a vector begins at an even column.
#pragma once

#include "formats.h"

namespace formats {

// The scale, and the zero point, of a block that does not keep its own; the scale also as it is stored.
struct Choice {
    float scale;
    int zero;
    float stored;
};

// Rows of `ld` numbers of what the codes are worth.
template <class T>
struct Numbers {
    T* out;
    int64_t ld;

    SIMD_INLINE void put(int64_t row, int64_t column, int64_t count, Float value, float scale, int) const {
        simd::store_up_to(out + row * ld + column, value * scale, count);
    }

    // As put, but for those that are the old numbers.
    SIMD_INLINE void keep(int64_t row, int64_t column, int64_t count, Float value, float scale, int, Int same,
                          Float old) const {
        simd::store_up_to(out + row * ld + column, same ? old : value * scale, count);
    }

    void rescale(const Matrix&, int64_t, int64_t, int64_t, const Choice&) const {}
};

// The code of a number on the grid.
template <int CODES>
SIMD_INLINE Int code_of(Float value, int zero) {
    if (CODES == INT4 || CODES == INT8) {
        const Int numbers = value == value;  // what is no number gets the code 0
        const Float held = (Float)((Int)value & numbers);
        return (__builtin_convertvector(held, Int) + (CODES == INT4 ? zero : 0)) & numbers;
    }
    const Int bits = (Int)value, size = bits & 0x7FFFFFFF;
    const Float magnitude = (Float)size;
    if (CODES == E2M1) {  // an exponent of 2 bits and a mantissa of 1, but for 0 and 0.5
        const Int small = (magnitude == 0.5f) & 1;
        return (magnitude >= 1.0f ? (size >> 22) - 252 : small) | (bits >> 28 & 8);
    }
    // multiples of 2^-9 below the smallest power of 2 that has a mantissa
    const Float least = magnitude < 0x1p-6f ? magnitude * 512.0f : magnitude - magnitude;
    const Int small = __builtin_convertvector((Float)((Int)least & (least == least)), Int);
    const Int code = magnitude >= 0x1p-6f ? (size >> 20) - 960 : small;
    return (magnitude == magnitude ? code : code * 0 + 0x7F) | (bits >> 24 & 0x80);
}

// The parts of the matrix. A block's old codes and scales have been read before it is written.
template <int CODES>
struct CodeRows {
    uint8_t* codes;
    int64_t ld;
    void* scales;
    int64_t ld_scales;
    uint8_t* zeros;
    int64_t ld_zeros;

    static constexpr bool PACKED = CODES == E2M1 || CODES == INT4;
    typedef uint8_t HalfBytes __attribute__((vector_size(LANES / 2)));
    typedef uint64_t Long __attribute__((vector_size(LANES * 4)));

    SIMD_INLINE void put(int64_t row, int64_t column, int64_t count, Float value, float, int zero) const {
        store(at(row, column), count, code_of<CODES>(value, zero));
    }

    SIMD_INLINE void keep(int64_t row, int64_t column, int64_t count, Float value, float, int zero, Int same,
                          Float) const {
        uint8_t* to = at(row, column);
        const Int old = load(to, count);
        store(to, count, same ? old : code_of<CODES>(value, zero));
    }

    void rescale(const Matrix& of, int64_t row, int64_t rows, int64_t group, const Choice& choice) const {
        for (int64_t i = row / of.granule; i < common::ceil_div(row + rows, of.granule); ++i) {
            const int64_t place = i * ld_scales + group;
            if (of.scale_type == SINGLE) ((float*)scales)[place] = choice.stored;
            else if (of.scale_type == BRAIN) simd::store_one((Bf16*)scales + place, choice.stored);
            else if (of.scale_type == HALF) ((uint16_t*)scales)[place] = stored_half(choice.stored);
            else ((uint8_t*)scales)[place] = stored_byte(of.scale_type, choice.stored);
        }
        if (CODES == INT4 && zeros) zeros[row * ld_zeros + group] = (uint8_t)choice.zero;
    }

private:
    uint8_t* at(int64_t row, int64_t column) const { return codes + row * ld + (PACKED ? column / 2 : column); }

    // A number that fp16 has, infinity or NaN.
    static uint16_t stored_half(float stored) {
        const float size = std::fabs(stored);
        uint32_t bits;
        memcpy(&bits, &size, sizeof bits);
        if (!(size <= 65504.0f)) bits = size == size ? 0x7C00 : 0x7E00;
        else if (size < 0x1p-14f) bits = (uint32_t)(size * 0x1p24f);
        else bits = (bits >> 13) - (112 << 10);
        return (uint16_t)(bits | (std::signbit(stored) ? 0x8000 : 0));
    }

    // An exponent, or e4m3.
    static uint8_t stored_byte(int scale_type, float stored) {
        if (scale_type < EXPONENT) return (uint8_t)code_of<E4M3>(simd::splat(stored), 0)[0];
        uint32_t bits;
        memcpy(&bits, &stored, sizeof bits);
        return (uint8_t)(bits >> 23);
    }

    static SIMD_INLINE Int load(const uint8_t* from, int64_t count) {
        if (!PACKED) return widen(load_bytes(from, count));
        HalfBytes bytes = {};
        if (count >= LANES) memcpy(&bytes, from, sizeof bytes);
        else memcpy(&bytes, from, common::ceil_div(count, 2));
        const Long pairs = __builtin_convertvector(bytes, Long);
        return (Int)(pairs | pairs << 28) & 15;
    }

    static SIMD_INLINE void store(uint8_t* to, int64_t count, Int code) {
        if (!PACKED) {
            const Byte bytes = __builtin_convertvector(code, Byte);
            if (count >= LANES) memcpy(to, &bytes, sizeof bytes);
            else memcpy(to, &bytes, count);
            return;
        }
        const Long pairs = (Long)code;
        const HalfBytes bytes = __builtin_convertvector(pairs | pairs >> 28, HalfBytes);
        if (count >= LANES) {
            memcpy(to, &bytes, sizeof bytes);
            return;
        }
        memcpy(to, &bytes, common::ceil_div(count, 2));
        if (count % 2) to[count / 2] &= 15;  // there is no second code
    }
};

}  // namespace formats
