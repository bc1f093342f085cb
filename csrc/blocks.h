// Products of the blocks that recurrences in chunks are made of: row-major fp32 in the cache, rows `ld` apart, columns
// padded to whole vectors. What lies in a padded column, or past the diagonal of a triangular block outside of the
// zeros that its maker writes, is never read as a factor.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common.h"
#include "simd.h"
#include "tiles.h"

namespace blocks {

using simd::Float;
using simd::LANES;
using tiles::Left;
using tiles::PANEL;
using tiles::ROWS;

// Hands out parts of one block of memory, each aligned to a cache line.
class Arena {
  public:
    explicit Arena(float* memory) : next_(memory) {}
    float* take(int64_t floats) {
        float* taken = next_;
        next_ += size(floats);
        return taken;
    }
    static int64_t size(int64_t floats) { return common::ceil_div(floats, 16) * 16; }

  private:
    float* next_;
};

// Distance between rows: a power of two would put them into few cache sets.
inline int64_t row_length(int64_t columns) { return common::ceil_div(columns, 16) * 16 + 16; }

// out[i, columns] (+)= sum over depth(i) of left(i, k) right[k, columns], for blocks of rows from i on; `depth` gives
// the first and the last k + 1.
template <bool ADD, class Depth>
inline void product_of(int64_t rows, int64_t columns, const Left& left, const float* right, int64_t ld_right, float* out,
                       int64_t ld_out, const Depth& depth) {
    for (int64_t column = 0; column < columns; column += PANEL) {
        const int64_t vectors = common::ceil_div(std::min(PANEL, columns - column), LANES);
        for (int64_t row = 0; row < rows; row += ROWS) {
            const int64_t count = std::min<int64_t>(ROWS, rows - row);
            const auto [first, end] = depth(row, count);
            tiles::tile_rows<ADD>(count, {left.data + row * left.row + first * left.step, left.row, left.step},
                                  right + first * ld_right + column, ld_right, vectors, end - first,
                                  out + row * ld_out + column, ld_out);
        }
    }
}

struct Range {
    int64_t first, end;
};

template <bool ADD>
inline void product(int64_t rows, int64_t columns, int64_t depth, const Left& left, const float* right,
                    int64_t ld_right, float* out, int64_t ld_out) {
    product_of<ADD>(rows, columns, left, right, ld_right, out, ld_out,
                    [=](int64_t, int64_t) { return Range{0, depth}; });
}

// The same with a lower triangular left operand [rows, rows], and with the transpose of one.
template <bool ADD>
inline void product_lower(int64_t rows, int64_t columns, const float* lower, int64_t ld, const float* right,
                          int64_t ld_right, float* out, int64_t ld_out) {
    product_of<ADD>(rows, columns, {lower, ld, 1}, right, ld_right, out, ld_out,
                    [](int64_t row, int64_t count) { return Range{0, row + count}; });
}

template <bool ADD>
inline void product_upper(int64_t rows, int64_t columns, const float* lower, int64_t ld, const float* right,
                          int64_t ld_right, float* out, int64_t ld_out) {
    product_of<ADD>(rows, columns, {lower, 1, ld}, right, ld_right, out, ld_out,
                    [rows](int64_t row, int64_t) { return Range{row, rows}; });
}

// The lower triangle of left [rows, depth] right [depth, rows], and what a tile computes beyond it.
inline void lower_of_product(int64_t rows, int64_t depth, const float* left, int64_t ld, const float* right,
                             int64_t ld_right, float* out, int64_t ld_out) {
    for (int64_t column = 0; column < rows; column += PANEL)
        for (int64_t row = column / ROWS * ROWS; row < rows; row += ROWS) {
            const int64_t count = std::min<int64_t>(ROWS, rows - row), columns = std::min(PANEL, row + count - column);
            if (columns <= 0) continue;
            tiles::tile_rows<false>(count, {left + row * ld, ld, 1}, right + column, ld_right,
                                    common::ceil_div(columns, LANES), depth, out + row * ld_out + column, ld_out);
        }
}

// from [rows, columns] -> to [columns, rows], up to the vectors' ends: zeros where `from` has no such row.
inline void transpose(const float* from, int64_t ld, int64_t rows, int64_t columns, float* to, int64_t ld_to) {
    for (int64_t row = 0; row < rows; row += LANES)
        for (int64_t column = 0; column < columns; column += LANES) {
            Float square[LANES];
#pragma GCC unroll 16
            for (int64_t i = 0; i < LANES; ++i)
                square[i] = row + i < rows ? simd::load(from + (row + i) * ld + column) : Float{};
            simd::transpose(square);
#pragma GCC unroll 16
            for (int64_t i = 0; i < LANES; ++i) simd::store(to + (column + i) * ld_to + row, square[i]);
        }
}

// x[i] += sum over the rows j before i (after i where TRANSPOSED) of factor(i, j) x[j], one after the other, within at
// most ROWS rows.
template <bool TRANSPOSED>
inline void solve_rows(int64_t rows, int64_t columns, const float* factors, int64_t ld_factors, float* x, int64_t ld) {
    for (int64_t column = 0; column < columns; column += LANES) {
        Float sums[ROWS];
        for (int64_t n = 0; n < rows; ++n) {
            const int64_t i = TRANSPOSED ? rows - 1 - n : n;
            Float sum = simd::load(x + i * ld + column);
            for (int64_t m = 0; m < n; ++m) {
                const int64_t j = TRANSPOSED ? rows - 1 - m : m;
                sum += (TRANSPOSED ? factors[j * ld_factors + i] : factors[i * ld_factors + j]) * sums[m];
            }
            sums[n] = sum;
            simd::store(x + i * ld + column, sum);
        }
    }
}

// Solves (I - factors) x = given, in place; factors [rows, rows] are strictly lower triangular.
inline void solve(int64_t rows, int64_t columns, const float* factors, int64_t ld_factors, float* x, int64_t ld) {
    for (int64_t first = 0; first < rows; first += ROWS) {
        const int64_t count = std::min<int64_t>(ROWS, rows - first);
        const float* block = factors + first * ld_factors;
        if (first > 0) product<true>(count, columns, first, {block, ld_factors, 1}, x, ld, x + first * ld, ld);
        solve_rows<false>(count, columns, block + first, ld_factors, x + first * ld, ld);
    }
}

// The same with the transpose of the factors.
inline void solve_transposed(int64_t rows, int64_t columns, const float* factors, int64_t ld_factors, float* x,
                             int64_t ld) {
    for (int64_t first = (rows - 1) / ROWS * ROWS; first >= 0; first -= ROWS) {
        const int64_t count = std::min<int64_t>(ROWS, rows - first), after = first + count;
        if (after < rows)
            product<true>(count, columns, rows - after, {factors + after * ld_factors + first, 1, ld_factors},
                          x + after * ld, ld, x + first * ld, ld);
        solve_rows<true>(count, columns, factors + first * ld_factors + first, ld_factors, x + first * ld, ld);
    }
}

inline float dot(const float* a, const float* b, int64_t size) {
    Float sums[4] = {};
    simd::for_each(size, [&](auto which, int64_t offset, int64_t count) {
        sums[which] += simd::load_up_to(a + offset, count) * simd::load_up_to(b + offset, count);
    });
    return simd::sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

}  // namespace blocks
