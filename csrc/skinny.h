// Products of which one dimension is the small rank of an adapter, in register tiles.
//
// All three products of a low-rank pair have one inner kernel: C[i, j] = sum over k of left(i, k) * right[k, j], where
// `left` is broadcast and `right` is read by vectors along j.
//     H  = drop(x) A^T    left = drop(x), right = A^T (packed)
//     dX = dH A           left = dH,      right = A
//     dA = dH^T drop(x)   left = dH^T,    right = drop(x), masked while it is read
// The order in which an element's products are added depends on k only, not on the tile it lies in.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "common.h"
#include "pairs.h"
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
template <class T>
struct Right {
    const T* data;
    int64_t ld;
    const uint8_t* bits;
    int64_t ld_bits;
    bool far;  // rows lie far apart and are not in the cache: fetch the next tile's part of each
};

template <int ROWS, int VECTORS, bool MASKED, bool PART, class T, class Finish>
SIMD_INLINE void tile(const Left& left, const Right<T>& right, int64_t depth, int64_t row, int64_t column,
                      int64_t count, const Finish& finish) {
    Float sums[ROWS][VECTORS] = {};
    const float* l = left.data + row * left.row;
    const T* r = right.data + column;
    const uint8_t* bits = right.bits;
    const bool fetch = right.far && row == 0;
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
        if (fetch)
            for (int v = 0; v < VECTORS; ++v) __builtin_prefetch(r + (VECTORS + v) * LANES);
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

template <int VECTORS, bool MASKED, bool PART, class T, class Finish>
SIMD_INLINE void tile_rows(const Left& left, const Right<T>& right, int64_t rows, int64_t depth, int64_t column,
                           int64_t count, const Finish& finish) {
    int64_t row = 0;
    for (; row + TILE_ROWS <= rows; row += TILE_ROWS)
        tile<TILE_ROWS, VECTORS, MASKED, PART>(left, right, depth, row, column, count, finish);
    for (; row < rows; ++row) tile<1, VECTORS, MASKED, PART>(left, right, depth, row, column, count, finish);
}

template <bool MASKED, class T, class Finish>
SIMD_INLINE void product_tiles(const Left& left, const Right<T>& right, int64_t rows, int64_t columns, int64_t depth,
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
template <class T, class Finish>
SIMD_INLINE void product(const Left& left, const Right<T>& right, int64_t rows, int64_t columns, int64_t depth,
                         const Finish& finish) {
    if (right.bits) product_tiles<true>(left, right, rows, columns, depth, finish);
    else product_tiles<false>(left, right, rows, columns, depth, finish);
}

// A matrix in panels of one tile's width, each contiguous and padded with zeros: [panels][rows][PANEL].
// Rows of a power of two lie in the same few cache sets; panels do not, and the panel of a tile is read in order.
constexpr int64_t PANEL = TILE_VECTORS * LANES;

class Panels {
  public:
    template <class T>
    Panels(int threads, int64_t rows, int64_t columns, const T* data, int64_t ld) : rows_(rows) {
        const int64_t panels = rows > 0 ? common::ceil_div(columns, PANEL) : 0;
        memory_.resize((size_t)(panels * rows * PANEL + 16));
        data_ = (float*)(((uintptr_t)memory_.data() + 63) & ~(uintptr_t)63);
        float* to = data_;
        common::parallel_for(threads, panels, [=](int64_t p) {
            const int64_t first = p * PANEL, count = std::min(PANEL, columns - first);
            for (int64_t r = 0; r < rows; ++r) {
                float* row = to + (p * rows + r) * PANEL;
                simd::widen_rows(data + r * ld + first, ld, 1, count, row, PANEL);
                std::fill(row + count, row + PANEL, 0.0f);
            }
        });
    }
    const float* panel(int64_t column) const { return data_ + column * rows_; }

  private:
    int64_t rows_;
    std::vector<float> memory_;
    float* data_;
};

// The rank-r update dY + scale * drop'(dH A), as a prologue of kernels that consume dY. No update where rank is 0.
// Compiled once for each type, in update.cpp.
template <class T>
class Update {
  public:
    Update(int threads, int64_t columns, int64_t rank, const T* dh, int64_t ld_dh, const T* a, int64_t ld_a,
           const uint8_t* bits, int64_t ld_bits, float scale)
        : a_(threads, by_pairs() ? 0 : rank, columns, a, ld_a), rank_(rank), dh_(dh), ld_dh_(ld_dh), bits_(bits),
          ld_bits_(ld_bits), scale_(scale) {
#if HAS_PAIRS
        if constexpr (std::is_same<T, simd::Bf16>::value)
            if (by_pairs() && rank > 0) pairs_.reset(new pairs::Panels(threads, rank, columns, a, ld_a));
#endif
    }

    bool wanted() const { return rank_ > 0; }

    // out = dy + update for rows [row, row + rows) and columns [column, column + columns), column a multiple of
    // 2 * PANEL; dy and out point to the first of these elements.
    template <class Out>
    void add(const T* dy, int64_t ld_dy, int64_t row, int64_t rows, int64_t column, int64_t columns, Out* out,
             int64_t ld_out) const;

  private:
    // Whether the products are made of pairs of bfloat16 numbers.
    static bool by_pairs() {
#if HAS_PAIRS
        return std::is_same<T, simd::Bf16>::value && pairs::found();
#else
        return false;
#endif
    }

    template <bool MASKED, class Out>
    void add_panels(const T* dy, int64_t ld_dy, int64_t row, int64_t rows, int64_t column, int64_t columns, Out* out,
                    int64_t ld_out) const;

#if HAS_PAIRS
    template <bool MASKED, class Out>
    void add_pairs(const T* dy, int64_t ld_dy, int64_t row, int64_t rows, int64_t column, int64_t columns, Out* out,
                   int64_t ld_out) const;

    std::unique_ptr<pairs::Panels> pairs_;
#endif
    Panels a_;
    int64_t rank_;
    const T* dh_;
    int64_t ld_dh_;
    const uint8_t* bits_;
    int64_t ld_bits_;
    float scale_;
};

}  // namespace skinny
