// A large product of fp32 matrices by AMX tiles, which multiply bfloat16 only.
//
// A number is written as a sum of bfloat16 numbers, x = x0 + x1 + x2, each the rest of the one before rounded: eight bits
// of the significand each, so three hold all 24. Of the nine products of two such sums the six largest are added up in
// fp32; those left out are below 2^-24 of the whole, as fp32's own rounding is. With two parts and three products the
// error is about 2^-17. Products of bfloat16 numbers are exact, and a tile adds 32 of them before it rounds them into
// the running sum, so the sums round less often than a fused multiply-add for each product does.
//
// What the tiles cannot hold: a number below 2^-126 counts as zero, and rests below it are lost; an infinite number, or
// one that rounds to infinity in bfloat16 (from 3.39e38 on), makes NaN.
//
// A part of A's columns is split once and shared by all threads; each item of work splits some columns of B for itself,
// small enough to stay in the second-level cache, and takes the rows of A past them. An element's sum runs over parts of
// DEPTH products in the order of k, whoever computes it: the result depends neither on the threads nor on the other
// rows and columns.
#include <algorithm>

#include "amx.h"

#if HAS_AMX

namespace {

using namespace amx;
using common::ceil_div;
using simd::Float;
using simd::LANES;

constexpr int64_t DEPTH = 512;     // of a part
constexpr int64_t HEIGHT = 2048;   // rows of A that are split at a time
constexpr int64_t COLUMNS = 256;   // of an item, at most
constexpr int64_t FEW_COLUMNS = 128;
constexpr int64_t TILE = 16 * 32;  // bfloat16 numbers
constexpr int64_t ROW = 64;        // bytes of a row of a tile

template <int PARTS>
constexpr int64_t BLOCK = PARTS * TILE;

SIMD_INLINE __mmask16 lanes(int64_t count) { return count >= LANES ? 0xFFFF : count <= 0 ? 0 : (1u << count) - 1; }

// `rest` without its leading bfloat16 number, which is given back as the high half of each word. Halves round up: what
// is left is exact either way. The last part is all of the rest.
template <bool LAST>
SIMD_INLINE __m512i take_part(__m512& rest) {
    const __m512i bits = _mm512_castps_si512(rest);
    if (LAST) return bits;
    const __m512i part = _mm512_and_si512(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)), _mm512_set1_epi32(~0xFFFF));
    rest = _mm512_sub_ps(rest, _mm512_castsi512_ps(part));
    return part;
}

// 32 numbers in a row -> PARTS rows of 32.
template <int PARTS>
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
template <int PARTS>
SIMD_INLINE void split_pair(__m512 even, __m512 odd, uint32_t* to) {
    for (int part = 0; part < PARTS; ++part) {
        const bool last = part == PARTS - 1;
        const __m512i low = last ? take_part<true>(even) : take_part<false>(even);
        const __m512i high = last ? take_part<true>(odd) : take_part<false>(odd);
        const __m512i pair = _mm512_mask_blend_epi16(0xAAAAAAAAu, (__m512i)((simd::Word)low >> 16), high);
        _mm512_storeu_si512(to + part * TILE / 2, pair);
    }
}

// data [rows <= 16, depth <= 32] -> tiles of rows, zeros around.
template <int PARTS>
void split_rows(const float* data, int64_t ld, int64_t rows, int64_t depth, __m512i (&tiles)[PARTS][16]) {
    const __mmask16 low = lanes(depth), high = lanes(depth - LANES);
    for (int64_t i = 0; i < 16; ++i) {
        __m512i parts[PARTS];
        const __mmask16 given = i < rows ? 0xFFFF : 0;
        split_row<PARTS>(_mm512_maskz_loadu_ps(low & given, data + i * ld),
                         _mm512_maskz_loadu_ps(high & given, data + i * ld + LANES), parts);
        for (int part = 0; part < PARTS; ++part) tiles[part][i] = parts[part];
    }
}

// a [rows, depth] -> a block of a left operand.
template <int PARTS>
void pack_left(const float* a, int64_t ld, int64_t rows, int64_t depth, Bf16* to) {
    __m512i tiles[PARTS][16];
    split_rows<PARTS>(a, ld, rows, depth, tiles);
    for (int part = 0; part < PARTS; ++part)
        for (int64_t i = 0; i < 16; ++i) _mm512_storeu_si512(to + part * TILE + i * STEP, tiles[part][i]);
}

// b [depth, columns] -> a block of a right operand.
template <int PARTS>
void pack_right(const float* b, int64_t ld, int64_t depth, int64_t columns, Bf16* to) {
    const __mmask16 given = lanes(columns);
    for (int64_t k = 0; k < STEP; k += 2)
        split_pair<PARTS>(_mm512_maskz_loadu_ps(k < depth ? given : 0, b + k * ld),
                          _mm512_maskz_loadu_ps(k + 1 < depth ? given : 0, b + (k + 1) * ld),
                          (uint32_t*)to + k / 2 * LANES);
}

// b kept as [columns, depth] -> the same.
template <int PARTS>
void pack_right_transposed(const float* b, int64_t ld, int64_t depth, int64_t columns, Bf16* to) {
    __m512i tiles[PARTS][16];
    split_rows<PARTS>(b, ld, columns, depth, tiles);
    for (int part = 0; part < PARTS; ++part) {
        Float square[LANES];
        for (int64_t i = 0; i < LANES; ++i) square[i] = (Float)tiles[part][i];  // a lane is a pair of numbers
        simd::transpose(square);
        for (int64_t i = 0; i < LANES; ++i) simd::store((float*)(to + part * TILE) + i * LANES, square[i]);
    }
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

// out [32, 32] = two blocks' rows times two blocks' columns, `steps` blocks deep. From one product to the next only one of
// the operands is loaded: seven loads for six products.
template <int PARTS>
void multiply_blocks(int64_t steps, const Bf16* left, const Bf16* right, float* out) {
    constexpr int64_t NEXT = BLOCK<PARTS>;
    const Bf16 *upper = left, *lower = left + steps * NEXT, *first = right, *second = right + steps * NEXT;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < steps; ++step, upper += NEXT, lower += NEXT, first += NEXT, second += NEXT) {
        if (PARTS == 3) {
            load_left(upper, lower, 2);
            load_right(first, second, 0);
            multiply_loaded();
        }
        load_left(upper, lower, 1);
        if (PARTS == 2) load_right(first, second, 0);
        multiply_loaded();
        if (PARTS == 3) {
            load_right(first, second, 1);
            multiply_loaded();
        }
        load_left(upper, lower, 0);
        multiply_loaded();
        if (PARTS == 3) {
            load_right(first, second, 2);
            multiply_loaded();
            load_right(first, second, 0);
        } else {
            load_right(first, second, 1);
        }
        multiply_loaded();
    }
    _tile_stored(0, out, STEP * 4);
    _tile_stored(1, out + LANES, STEP * 4);
    _tile_stored(2, out + LANES * STEP, STEP * 4);
    _tile_stored(3, out + LANES * STEP + LANES, STEP * 4);
}

// to [rows, columns] (+)= from [rows, STEP].
void store_block(bool add, const float* from, int64_t rows, int64_t columns, float* to, int64_t ld) {
    const __mmask16 low = lanes(columns), high = lanes(columns - LANES);
    for (int64_t i = 0; i < rows; ++i, from += STEP, to += ld) {
        __m512 first = _mm512_load_ps(from), second = _mm512_load_ps(from + LANES);
        if (add) {
            first = _mm512_add_ps(first, _mm512_maskz_loadu_ps(low, to));
            second = _mm512_add_ps(second, _mm512_maskz_loadu_ps(high, to + LANES));
        }
        _mm512_mask_storeu_ps(to, low, first);
        _mm512_mask_storeu_ps(to + LANES, high, second);
    }
}

struct Matrix {
    const float* data;
    int64_t ld;
    bool transposed;
};

// Columns of an item: as even a share for each thread as there is, and of those that are equal the widest.
int64_t item_width(int64_t columns, int threads) {
    int64_t best = COLUMNS, least = INT64_MAX;
    for (int64_t width = COLUMNS; width >= FEW_COLUMNS; width -= STEP) {
        const int64_t share = ceil_div(ceil_div(columns, width), threads) * width;
        if (share < least) best = width, least = share;
    }
    return best;
}

// Columns [column, + columns) of B, rows [k, + depth) -> blocks [column block][step].
template <int PARTS>
void pack_columns(const Matrix& b, int64_t k, int64_t depth, int64_t column, int64_t columns, Bf16* to) {
    for (int64_t c = 0; c < padded(columns); c += LANES)
        for (int64_t from = 0; from < depth; from += STEP, to += BLOCK<PARTS>) {
            const int64_t deep = std::min(STEP, depth - from), wide = std::min<int64_t>(LANES, columns - c);
            const int64_t row = k + from, at = column + std::min(c, columns);  // past the end nothing is read
            if (b.transposed) pack_right_transposed<PARTS>(b.data + at * b.ld + row, b.ld, deep, wide, to);
            else pack_right<PARTS>(b.data + row * b.ld + at, b.ld, deep, wide, to);
        }
}

// Some rows of C, already split, times some columns of B, already split.
template <int PARTS>
void multiply_item(bool add, int64_t rows, int64_t columns, int64_t steps, const Bf16* left, const Bf16* right, float* c,
                   int64_t ld) {
    alignas(64) float out[STEP * STEP];
    const int64_t next = 2 * steps * BLOCK<PARTS>, pairs = ceil_div(columns, STEP);
    for (int64_t row = 0; row < rows; row += STEP, left += next)
        for (int64_t pair = 0; pair < pairs; ++pair) {
            const int64_t column = pair * STEP, high = std::min(STEP, rows - row), wide = std::min(STEP, columns - column);
            multiply_blocks<PARTS>(steps, left, right + pair * next, out);
            store_block(add, out, high, wide, c + row * ld + column, ld);
        }
}

template <int PARTS>
void product(int threads, int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t ld_a, const Matrix& b,
             float* c, int64_t ld_c) {
    const int64_t width = item_width(columns, threads), blocks = ceil_div(columns, width);
    // few columns leave threads without work: then items have some of the rows only
    const int64_t shares = std::max<int64_t>(1, threads / std::max<int64_t>(1, blocks));
    for (int64_t k = 0; k < depth; k += DEPTH)
        for (int64_t top = 0; top < rows; top += HEIGHT) {
            const int64_t deep = std::min(DEPTH, depth - k), steps = ceil_div(deep, STEP);
            const int64_t high = std::min(HEIGHT, rows - top), size = steps * BLOCK<PARTS>;
            Bf16* left = (Bf16*)common::scratch<0>(padded(high) / LANES * size / 2);
            common::parallel_for(threads, padded(high) / LANES, [=](int64_t block) {
                const int64_t row = std::min(block * LANES, high);
                for (int64_t step = 0; step < steps; ++step)
                    pack_left<PARTS>(a + (top + row) * ld_a + k + step * STEP, ld_a, high - row,
                                     std::min(STEP, deep - step * STEP), left + block * size + step * BLOCK<PARTS>);
            });
            const int64_t share = padded(ceil_div(high, shares));
            common::parallel_for(threads, blocks * shares, [=](int64_t item) {
                const int64_t column = item % blocks * width, wide = std::min(width, columns - column);
                const int64_t row = item / blocks * share, some = std::min(share, high - row);
                if (some <= 0) return;
                Bf16* right = (Bf16*)common::scratch<1>(padded(wide) / LANES * size / 2);
                pack_columns<PARTS>(b, k, deep, column, wide, right);
                Tiles tiles;
                multiply_item<PARTS>(k > 0, some, wide, steps, left + row / LANES * size, right,
                                     c + (top + row) * ld_c + column, ld_c);
            });
        }
}

}  // namespace

#endif

// has: 1 where engine_product_amx can be called.
EXPORT void engine_has_amx(int* has) {
#if HAS_AMX
    static const bool found = amx::ask();
    *has = found;
#else
    *has = 0;
#endif
}

// As engine_product, from `parts` (2 or 3) bfloat16 numbers for each number; depth is at least 1.
EXPORT void engine_product_amx(int threads, int parts, int64_t rows, int64_t columns, int64_t depth, const float* a,
                               int64_t ld_a, const float* b, int64_t ld_b, int transposed, float* c, int64_t ld_c) {
#if HAS_AMX
    const Matrix right = {b, ld_b, transposed != 0};
    if (parts == 2) product<2>(threads, rows, columns, depth, a, ld_a, right, c, ld_c);
    else product<3>(threads, rows, columns, depth, a, ld_a, right, c, ld_c);
#else
    (void)threads, (void)parts, (void)rows, (void)columns, (void)depth, (void)a, (void)ld_a, (void)b, (void)ld_b;
    (void)transposed, (void)c, (void)ld_c;
#endif
}
