// Some rows of a weight with a low-rank update added, W + B A, summed in fp32 and rounded once to the weight's dtype,
// and what the rounding took away.
#include <algorithm>

#include "common.h"
#include "simd.h"
#include "tiles.h"

namespace {

using simd::Float;
using simd::LANES;
using tiles::PANEL;
using tiles::ROWS;

// Of differences between stored and exact values, and of the exact values.
struct Rounding {
    Float most = {}, squared_error = {}, squared_value = {};
};

// exact [count of LANES], weight -> exact, before the update.
template <class T>
void widen(const T* weight, int64_t columns, float* exact) {
    for (int64_t c = 0; c < columns; c += LANES) simd::store(exact + c, simd::load_up_to(weight + c, columns - c));
}

template <class T>
void round(const float* exact, int64_t columns, T* out, Rounding& found) {
    for (int64_t c = 0; c < columns; c += LANES) {
        const int64_t count = std::min<int64_t>(LANES, columns - c);
        const Float value = simd::load(exact + c);
        simd::store_up_to(out + c, value, count);
        // lanes past the end hold zeros, as the update's do there
        const Float error = simd::load_up_to(out + c, count) - value, size = error < 0.0f ? -error : error;
        found.most = size > found.most ? size : found.most;
        found.squared_error += error * error;
        found.squared_value += value * value;
    }
}

template <class T>
void merge(int64_t rows, int64_t columns, int64_t rank, const T* weight, int64_t ld_weight, const float* b,
           int64_t ld_b,
           const float* a, int64_t ld_a, T* out, int64_t ld_out, double* rounding) {
    alignas(64) float exact[ROWS * PANEL];
    float* panel = common::scratch<0>(rank * PANEL);
    double most = rounding[0], squared_error = rounding[1], squared_value = rounding[2];
    for (int64_t column = 0; column < columns; column += PANEL) {
        const int64_t wide = std::min(PANEL, columns - column), width = tiles::padded(wide);
        for (int64_t r = 0; r < rank; ++r)
            for (int64_t c = 0; c < width; c += LANES)
                simd::store(panel + r * width + c, simd::load_up_to(a + r * ld_a + column + c, wide - c));
        Rounding found;
        for (int64_t row = 0; row < rows; row += ROWS) {
            const int64_t high = std::min<int64_t>(ROWS, rows - row);
            for (int64_t i = 0; i < high; ++i) widen(weight + (row + i) * ld_weight + column, wide, exact + i * PANEL);
            tiles::tile_rows<true>(high, {b + row * ld_b, ld_b, 1}, panel, width, width / LANES, rank, exact, PANEL);
            for (int64_t i = 0; i < high; ++i) round(exact + i * PANEL, wide, out + (row + i) * ld_out + column, found);
        }
        for (int64_t lane = 0; lane < LANES; ++lane) most = std::max<double>(most, found.most[lane]);
        squared_error += simd::sum(found.squared_error);
        squared_value += simd::sum(found.squared_value);
    }
    rounding[0] = most, rounding[1] = squared_error, rounding[2] = squared_value;
}

}  // namespace

// out [rows, columns] = weight + b [rows, rank] a [rank, columns]; weight and out of one type, out may be weight.
// rounding: the largest absolute difference of `out` from the sum in fp32, and the sums of squares of all differences
// and of all sums, added to what is there. One thread.
EXPORT void engine_merge(int type, int64_t rows, int64_t columns, int64_t rank, const void* weight, int64_t ld_weight,
                         const float* b, int64_t ld_b, const float* a, int64_t ld_a, void* out, int64_t ld_out,
                         double* rounding) {
    simd::with_type(type, [=](auto zero) {
        using T = decltype(zero);
        merge(rows, columns, rank, (const T*)weight, ld_weight, b, ld_b, a, ld_a, (T*)out, ld_out, rounding);
    });
}
