// Products of matrices that fit in the cache, in register tiles: C[i, j] = sum over k of left(i, k) * right[k, j].
//
// `left` is broadcast element by element, so any strides will do; `right` is read by vectors from panels (see below).
// The order in which an element's products are added depends on k only, not on the tile it lies in.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common.h"
#include "simd.h"

namespace tiles {

using simd::Float;
using simd::LANES;

constexpr int ROWS = 6;
#if SIMD_AVX512
constexpr int VECTORS = 4;  // 6 x 4 sums, 4 operands, 1 broadcast: 29 of 32 registers
#else
constexpr int VECTORS = 2;  // 6 x 2 sums, 2 operands, 1 broadcast: 15 of 16 registers
#endif

// A matrix is kept in panels of PANEL columns, each [rows][PANEL] without gaps; the last one is as many vectors wide as
// it needs, filled up with zeros. So rows a power of two apart do not fall into the same cache sets.
constexpr int64_t PANEL = VECTORS * LANES;

inline int64_t padded(int64_t columns) { return common::ceil_div(columns, LANES) * LANES; }

// Elements between two rows of the panel that begins at `column`.
inline int64_t panel_width(int64_t columns, int64_t column) { return std::min(PANEL, padded(columns) - column); }

// data [rows, columns] -> panels of it.
template <class T>
void pack(const T* data, int64_t ld, int64_t rows, int64_t columns, float* to) {
    for (int64_t column = 0; column < columns; column += PANEL) {
        const int64_t width = panel_width(columns, column), count = std::min(width, columns - column);
        for (int64_t row = 0; row < rows; ++row, to += width) {
            simd::widen_rows(data + row * ld + column, ld, 1, count, to, width);
            std::fill(to + count, to + width, 0.0f);
        }
    }
}

// data [columns, rows] -> panels of its transpose, a square of vectors at a time.
template <class T>
void pack_transposed(const T* data, int64_t ld, int64_t rows, int64_t columns, float* to) {
    for (int64_t column = 0; column < columns; column += PANEL) {
        const int64_t width = panel_width(columns, column);
        for (int64_t c = 0; c < width; c += LANES) {
            const int64_t given = std::min<int64_t>(LANES, columns - column - c);
            const T* from = data + (column + c) * ld;
            for (int64_t row = 0; row < rows; row += LANES) {
                const int64_t count = std::min<int64_t>(LANES, rows - row);
                Float square[LANES];
                for (int64_t i = 0; i < LANES; ++i)
                    square[i] = i < given ? simd::load_up_to(from + i * ld + row, count) : Float{};
                simd::transpose(square);
                for (int64_t i = 0; i < count; ++i) simd::store(to + (row + i) * width + c, square[i]);
            }
        }
        to += rows * width;
    }
}

// Element (i, k) lies at data[i * row + k * step].
struct Left {
    const float* data;
    int64_t row, step;
};

template <int NUM_ROWS, int NUM_VECTORS, bool ADD>
SIMD_INLINE void tile(const Left& left, const float* right, int64_t ld_right, int64_t depth, float* out,
                      int64_t ld_out) {
    Float sums[NUM_ROWS][NUM_VECTORS] = {};
    const float* l = left.data;
#pragma GCC unroll 2
    for (int64_t k = 0; k < depth; ++k, l += left.step, right += ld_right) {
        Float operand[NUM_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < NUM_VECTORS; ++v) operand[v] = simd::load(right + v * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < NUM_ROWS; ++i) {
            const float factor = l[i * left.row];
#pragma GCC unroll 4
            for (int v = 0; v < NUM_VECTORS; ++v) sums[i][v] += factor * operand[v];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < NUM_ROWS; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < NUM_VECTORS; ++v) {
            float* to = out + i * ld_out + v * LANES;
            simd::store(to, ADD ? simd::load(to) + sums[i][v] : sums[i][v]);
        }
}

// One row tile of `vectors` vectors.
template <int NUM_ROWS, bool ADD>
inline void tile_of(const Left& left, const float* right, int64_t ld_right, int64_t vectors, int64_t depth, float* out,
                    int64_t ld_out) {
    switch (vectors) {
        case 1: tile<NUM_ROWS, 1, ADD>(left, right, ld_right, depth, out, ld_out); break;
        case 2: tile<NUM_ROWS, 2, ADD>(left, right, ld_right, depth, out, ld_out); break;
#if SIMD_AVX512
        case 3: tile<NUM_ROWS, 3, ADD>(left, right, ld_right, depth, out, ld_out); break;
        case 4: tile<NUM_ROWS, 4, ADD>(left, right, ld_right, depth, out, ld_out); break;
#endif
    }
}

// As tile_of for `rows` <= ROWS; `right` has `ld_right` elements between its rows.
template <bool ADD>
inline void tile_rows(int64_t rows, const Left& left, const float* right, int64_t ld_right, int64_t vectors,
                      int64_t depth, float* out, int64_t ld_out) {
    if (rows == ROWS) {
        tile_of<ROWS, ADD>(left, right, ld_right, vectors, depth, out, ld_out);
        return;
    }
    for (int64_t i = 0; i < rows;) {
        const Left rest = {left.data + i * left.row, left.row, left.step};
        if (rows - i >= 2) tile_of<2, ADD>(rest, right, ld_right, vectors, depth, out + i * ld_out, ld_out), i += 2;
        else tile_of<1, ADD>(rest, right, ld_right, vectors, depth, out + i * ld_out, ld_out), i += 1;
    }
}

}  // namespace tiles
