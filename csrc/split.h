// fp32 numbers as sums of bfloat16 numbers, packed for AMX tiles, which multiply bfloat16 only.
//
// x = x0 + x1 + x2, each the rest of the one before rounded: eight bits of the significand each, so three hold all 24.
// Of the nine products of two such sums the six largest are added up in fp32; those left out are below 2^-24 of the
// whole, as fp32's own rounding is. Products of bfloat16 numbers are exact, and a tile adds 32 of them before it rounds
// them into the running sum, so the sums round less often than a fused multiply-add for each product does.
//
// What the tiles cannot hold: a number below 2^-126 counts as zero, and rests below it are lost; an infinite number, or
// one that rounds to infinity in bfloat16 (from 3.39e38 on), makes NaN.
//
// A block is 16 rows of a left operand, or 16 columns of a right one, and STEP deep: a tile for each of its parts.
#pragma once

#include <algorithm>

#include "amx.h"

#if HAS_AMX

namespace split {

using amx::STEP;
using simd::Bf16;
using simd::Float;
using simd::LANES;

constexpr int64_t PARTS = 3;
constexpr int64_t TILE = 16 * 32;  // bfloat16 numbers
constexpr int64_t BLOCK = PARTS * TILE;
constexpr int64_t ROW = 64;  // bytes of a row of a tile

SIMD_INLINE __mmask16 lanes(int64_t count) { return count >= LANES ? 0xFFFF : count <= 0 ? 0 : (1u << count) - 1; }

// `rest` without its leading bfloat16 number, which is given back as the high half of each word. Halves round up: what
// is left is exact either way. The last part is all of the rest.
template <bool LAST>
SIMD_INLINE __m512i take_part(__m512& rest) {
    const __m512i bits = _mm512_castps_si512(rest);
    if (LAST) return bits;
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_set1_epi32(0x8000));
    const __m512i part = _mm512_and_si512(rounded, _mm512_set1_epi32(~0xFFFF));
    rest = _mm512_sub_ps(rest, _mm512_castsi512_ps(part));
    return part;
}

// 32 numbers in a row -> PARTS rows of 32.
SIMD_INLINE void split_row(__m512 low, __m512 high, __m512i* parts) {
    alignas(64) static constexpr uint16_t ODD[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                     33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    const __m512i odd = _mm512_load_si512(ODD);
    for (int part = 0; part < PARTS - 1; ++part) {
        const __m512i first = take_part<false>(low), second = take_part<false>(high);
        parts[part] = _mm512_permutex2var_epi16(first, odd, second);
    }
    parts[PARTS - 1] = _mm512_permutex2var_epi16(take_part<true>(low), odd, take_part<true>(high));
}

// Two rows of 16 numbers -> PARTS rows of pairs, the upper number in the low half of a word.
SIMD_INLINE void split_pair(__m512 even, __m512 odd, uint32_t* to) {
    for (int part = 0; part < PARTS; ++part) {
        const bool last = part == PARTS - 1;
        const __m512i low = last ? take_part<true>(even) : take_part<false>(even);
        const __m512i high = last ? take_part<true>(odd) : take_part<false>(odd);
        const __m512i pair = _mm512_mask_blend_epi16(0xAAAAAAAAu, (__m512i)((simd::Word)low >> 16), high);
        _mm512_storeu_si512(to + part * TILE / 2, pair);
    }
}

// data [rows <= 16, depth <= 32] -> tiles of rows, zeros around. Callers go along the rows: what comes next is fetched.
inline void split_rows(const float* data, int64_t ld, int64_t rows, int64_t depth, __m512i (&tiles)[PARTS][16]) {
    const __mmask16 low = lanes(depth), high = lanes(depth - LANES);
    for (int64_t i = 0; i < 16; ++i) {
        __m512i parts[PARTS];
        const __mmask16 given = i < rows ? 0xFFFF : 0;
        const char* next = (const char*)(data + std::min(i, rows) * ld + STEP);
        _mm_prefetch(next, _MM_HINT_T0);
        _mm_prefetch(next + ROW, _MM_HINT_T0);
        split_row(_mm512_maskz_loadu_ps(low & given, data + i * ld),
                  _mm512_maskz_loadu_ps(high & given, data + i * ld + LANES), parts);
        for (int part = 0; part < PARTS; ++part) tiles[part][i] = parts[part];
    }
}

// a [rows, depth] -> a block of a left operand.
inline void pack_left(const float* a, int64_t ld, int64_t rows, int64_t depth, Bf16* to) {
    __m512i tiles[PARTS][16];
    split_rows(a, ld, rows, depth, tiles);
    for (int part = 0; part < PARTS; ++part)
        for (int64_t i = 0; i < 16; ++i) _mm512_storeu_si512(to + part * TILE + i * STEP, tiles[part][i]);
}

// b [depth, columns] -> a block of a right operand.
inline void pack_right(const float* b, int64_t ld, int64_t depth, int64_t columns, Bf16* to) {
    const __mmask16 given = lanes(columns);
    for (int64_t k = 0; k < STEP; k += 2)
        split_pair(_mm512_maskz_loadu_ps(k < depth ? given : 0, b + k * ld),
                   _mm512_maskz_loadu_ps(k + 1 < depth ? given : 0, b + (k + 1) * ld), (uint32_t*)to + k / 2 * LANES);
}

// b kept as [columns, depth] -> the same.
inline void pack_right_transposed(const float* b, int64_t ld, int64_t depth, int64_t columns, Bf16* to) {
    __m512i tiles[PARTS][16];
    split_rows(b, ld, columns, depth, tiles);
    for (int part = 0; part < PARTS; ++part) {
        Float square[LANES];
        for (int64_t i = 0; i < LANES; ++i) square[i] = (Float)tiles[part][i];  // a lane is a pair of numbers
        simd::transpose(square);
        for (int64_t i = 0; i < LANES; ++i) simd::store((float*)(to + part * TILE) + i * LANES, square[i]);
    }
}

// A block of a left operand, with zeros where the bit of an element is 0. `bits`: those of the block's first row.
inline void keep_left(const Bf16* from, int64_t rows, const uint8_t* bits, int64_t ld_bits, Bf16* to) {
    for (int64_t i = 0; i < 16; ++i) {
        uint32_t word = 0;
        if (i < rows) memcpy(&word, bits + i * ld_bits, sizeof word);
        for (int64_t part = 0; part < PARTS; ++part) {
            const int64_t at = part * TILE + i * STEP;
            _mm512_storeu_si512(to + at, _mm512_maskz_loadu_epi16(word, from + at));
        }
    }
}

// Half a block is 16 deep. On the left its tiles are [x2 | x1], [x1 | x0] and [x0 | x0], which times [y0; y1], the same
// and [y0; y2] are the six products, at half the price of a block that is filled up with zeros.
constexpr int64_t HALF_LEFT = 3 * TILE, HALF_RIGHT = 2 * TILE;

// a [rows <= 16, depth <= 16] -> half a block.
inline void pack_half_left(const float* a, int64_t ld, int64_t rows, int64_t depth, Bf16* to) {
    constexpr int FIRST[3] = {2, 1, 0}, SECOND[3] = {1, 0, 0};
    for (int64_t i = 0; i < 16; ++i) {
        __m512 rest = _mm512_maskz_loadu_ps(i < rows ? lanes(depth) : 0, a + i * ld);
        __m256i parts[PARTS];
        for (int part = 0; part < PARTS; ++part) {
            const __m512i words = part == PARTS - 1 ? take_part<true>(rest) : take_part<false>(rest);
            parts[part] = _mm512_cvtepi32_epi16((__m512i)((simd::Word)words >> 16));
        }
        for (int tile = 0; tile < 3; ++tile)
            _mm512_storeu_si512(to + tile * TILE + i * STEP,
                                _mm512_inserti64x4(_mm512_castsi256_si512(parts[FIRST[tile]]), parts[SECOND[tile]], 1));
    }
}

// b [16, 16] -> half a block.
inline void pack_half_right(const float* b, int64_t ld, Bf16* to) {
    constexpr int64_t HALF = TILE / 2;
    for (int64_t k = 0; k < LANES; k += 2) {
        alignas(64) uint32_t pairs[BLOCK / 2];
        split_pair(_mm512_loadu_ps(b + k * ld), _mm512_loadu_ps(b + (k + 1) * ld), pairs);
        Bf16* row = to + k * LANES;
        for (Bf16* tile : {row, row + TILE}) memcpy(tile, pairs, ROW);
        memcpy(row + HALF, pairs + TILE / 2, ROW);
        memcpy(row + TILE + HALF, pairs + TILE, ROW);
    }
}

// Sums of a product lie in tiles 0 to 3 from `clear` to `store`.
SIMD_INLINE void clear() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// [32, 32]: tiles 0 and 1 above 2 and 3.
SIMD_INLINE void store(float* out) {
    _tile_stored(0, out, STEP * 4);
    _tile_stored(1, out + LANES, STEP * 4);
    _tile_stored(2, out + LANES * STEP, STEP * 4);
    _tile_stored(3, out + LANES * STEP + LANES, STEP * 4);
}

SIMD_INLINE void load_left(const Bf16* upper, const Bf16* lower, int64_t part) {
    _tile_loadd(4, upper + part * TILE, ROW);
    _tile_loadd(5, lower + part * TILE, ROW);
}

SIMD_INLINE void load_right(const Bf16* first, const Bf16* second, int64_t part) {
    _tile_loadd(6, first + part * TILE, ROW);
    _tile_loadd(7, second + part * TILE, ROW);
}

SIMD_INLINE void multiply_loaded() {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
}

// Adds two blocks' rows times two blocks' columns, `steps` blocks deep; the second of each lies `next_*` after the
// first. From one product to the next only one of the operands is loaded: seven loads for six products. What `beside`
// does with each step runs beside the tiles' products.
template <class Beside>
SIMD_INLINE void multiply(int64_t steps, const Bf16* left, int64_t next_left, const Bf16* right, int64_t next_right,
                          const Beside& beside) {
    for (int64_t step = 0; step < steps; ++step, left += BLOCK, right += BLOCK) {
        const Bf16 *lower = left + next_left, *second = right + next_right;
        load_left(left, lower, 2);
        load_right(right, second, 0);
        multiply_loaded();
        beside(step);
        load_left(left, lower, 1);
        multiply_loaded();
        load_right(right, second, 1);
        multiply_loaded();
        load_left(left, lower, 0);
        multiply_loaded();
        load_right(right, second, 2);
        multiply_loaded();
        load_right(right, second, 0);
        multiply_loaded();
    }
}

// The same for two half blocks of each.
SIMD_INLINE void multiply_half(const Bf16* left, int64_t next_left, const Bf16* right, int64_t next_right) {
    const Bf16 *lower = left + next_left, *second = right + next_right;
    load_left(left, lower, 0);
    load_right(right, second, 0);
    multiply_loaded();
    load_left(left, lower, 1);
    multiply_loaded();
    load_left(left, lower, 2);
    load_right(right, second, 1);
    multiply_loaded();
}

// The same for one block of columns. Two sums each take turns, since a tile's next product waits for its last one: the
// right half of what is stored is to be added to the left.
SIMD_INLINE void multiply_narrow(int64_t steps, const Bf16* left, int64_t next_left, const Bf16* right) {
    for (; steps > 0; --steps, left += BLOCK, right += BLOCK) {
        const Bf16* lower = left + next_left;
        load_left(left, lower, 2);
        _tile_loadd(6, right, ROW);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        load_left(left, lower, 1);
        _tile_dpbf16ps(1, 4, 6);
        _tile_dpbf16ps(3, 5, 6);
        _tile_loadd(7, right + TILE, ROW);
        _tile_dpbf16ps(0, 4, 7);
        _tile_dpbf16ps(2, 5, 7);
        load_left(left, lower, 0);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        _tile_loadd(7, right + 2 * TILE, ROW);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
}

}  // namespace split

#endif
