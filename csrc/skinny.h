// Products of which one dimension is the small rank of an adapter, in register tiles.
//
// All three products of a low-rank pair have one inner kernel: C[i, j] = sum over k of left(i, k) * right[k, j], where
// `left` is broadcast and `right` is read by vectors along j.
//     H  = drop(x) A^T    left = drop(x), right = A^T (packed)
//     dX = dH A           left = dH,      right = A
//     dA = dH^T drop(x)   left = dH^T,    right = drop(x), masked while it is read
// The order in which an element's products are added depends on k only, not on the tile it lies in.
#pragma once

#include <cstdint>

#include "simd.h"

namespace skinny {

using simd::Float;
using simd::LANES;

#if SIMD_AVX512
constexpr int TILE_ROWS = 8;  // 8 x 3 sums, 3 operands: 27 of 32 registers
#else
constexpr int TILE_ROWS = 4;  // 4 x 3 sums, 3 operands, 1 broadcast: 16 registers
#endif
constexpr int TILE_VECTORS = 3;

// Element (i, k) lies at data[i * row + k * depth].
struct Left {
    const float* data;
    int64_t row, depth;
};

// Row-major; elements whose bit is 0 count as 0 where `bits` is given.
struct Right {
    const float* data;
    int64_t ld;
    const uint8_t* bits;
    int64_t ld_bits;
};

template <int ROWS, int VECTORS, bool MASKED, bool PART, class Finish>
SIMD_INLINE void tile(const Left& left, const Right& right, int64_t depth, int64_t row, int64_t column, int64_t count,
                      const Finish& finish) {
    Float sums[ROWS][VECTORS] = {};
    const float* l = left.data + row * left.row;
    const float* r = right.data + column;
    const uint8_t* bits = right.bits;
    for (int64_t k = 0; k < depth; ++k) {
        Float operand[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
            operand[v] = PART ? simd::load_part(r, count) : simd::load(r + v * LANES);
            if (MASKED) operand[v] = simd::keep_lanes(operand[v], bits, column + v * LANES);
        }
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i) {
            const float factor = l[i * left.row];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) sums[i][v] += factor * operand[v];
        }
        l += left.depth;
        r += right.ld;
        if (MASKED) bits += right.ld_bits;
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v)
            finish(row + i, column + v * LANES, PART ? count : (int64_t)LANES, sums[i][v]);
}

template <int VECTORS, bool MASKED, bool PART, class Finish>
SIMD_INLINE void tile_rows(const Left& left, const Right& right, int64_t rows, int64_t depth, int64_t column,
                           int64_t count, const Finish& finish) {
    int64_t row = 0;
    for (; row + TILE_ROWS <= rows; row += TILE_ROWS)
        tile<TILE_ROWS, VECTORS, MASKED, PART>(left, right, depth, row, column, count, finish);
    for (; row + 2 <= rows; row += 2) tile<2, VECTORS, MASKED, PART>(left, right, depth, row, column, count, finish);
    for (; row < rows; ++row) tile<1, VECTORS, MASKED, PART>(left, right, depth, row, column, count, finish);
}

template <bool MASKED, class Finish>
SIMD_INLINE void product_tiles(const Left& left, const Right& right, int64_t rows, int64_t columns, int64_t depth,
                               const Finish& finish) {
    int64_t column = 0;
    while (columns - column >= LANES) {
        const int64_t vectors = (columns - column) / LANES;
        // four vectors left go as two and two: one alone cannot hide its latency
        if (vectors == 4 || vectors == 2) {
            tile_rows<2, MASKED, false>(left, right, rows, depth, column, LANES, finish);
            column += 2 * LANES;
        } else if (vectors >= TILE_VECTORS) {
            tile_rows<TILE_VECTORS, MASKED, false>(left, right, rows, depth, column, LANES, finish);
            column += TILE_VECTORS * LANES;
        } else {
            tile_rows<1, MASKED, false>(left, right, rows, depth, column, LANES, finish);
            column += LANES;
        }
    }
    if (column < columns) tile_rows<1, MASKED, true>(left, right, rows, depth, column, columns - column, finish);
}

// finish(row, column, count, Float) takes `count` elements of C from (row, column) on.
template <class Finish>
SIMD_INLINE void product(const Left& left, const Right& right, int64_t rows, int64_t columns, int64_t depth,
                         const Finish& finish) {
    if (right.bits) product_tiles<true>(left, right, rows, columns, depth, finish);
    else product_tiles<false>(left, right, rows, columns, depth, finish);
}

// The rank-r update dY + scale * drop'(dH A), as a prologue of kernels that consume dY. No update where rank is 0.
struct Update {
    int64_t rank;
    const float* dh;
    int64_t ld_dh;
    const float* a;
    int64_t ld_a;
    const uint8_t* bits;
    int64_t ld_bits;
    float scale;

    // out = dy + update for rows [row, row + rows) and columns [column, column + columns); column is a multiple of 16.
    void add(const float* dy, int64_t ld_dy, int64_t row, int64_t rows, int64_t column, int64_t columns, float* out,
             int64_t ld_out) const {
        const Left left = {dh + row * ld_dh, ld_dh, 1};
        const Right right = {a + column, ld_a, nullptr, 0};
        const uint8_t* row_bits = bits ? bits + row * ld_bits + column / 8 : nullptr;
        const float* from = dy + row * ld_dy + column;
        const float factor = scale;
        const int64_t bits_stride = ld_bits;
        product_tiles<false>(left, right, rows, columns, rank, [=](int64_t i, int64_t j, int64_t count, Float sum) {
            if (row_bits) sum = simd::keep_lanes(sum, row_bits + i * bits_stride, j);
            const Float value = simd::load_up_to(from + i * ld_dy + j, count) + factor * sum;
            simd::store_up_to(out + i * ld_out + j, value, count);
        });
    }
};

}  // namespace skinny
