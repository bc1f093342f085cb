// The rank-r update of a gradient, in register tiles; see skinny.h.
#include "skinny.h"

namespace skinny {

template <bool MASKED>
void Update::add_panels(const float* dy, int64_t ld_dy, int64_t row, int64_t rows, int64_t column, int64_t columns,
                        float* out, int64_t ld_out) const {
    const Left left = {dh_ + row * ld_dh_, ld_dh_, 1};
    const float scale = scale_;
    const int64_t ld_bits = ld_bits_;
    for (int64_t c = 0; c < columns; c += PANEL) {
        const Right right = {a_.panel(column + c), PANEL, nullptr, 0, false};
        const uint8_t* bits = MASKED ? bits_ + row * ld_bits : nullptr;
        const float* from = dy + row * ld_dy + column + c;
        float* to = out + c;
        const int64_t first = column + c, left_over = columns - c;
        const auto masked = [=](int64_t i, int64_t j, Float sum) {
            return MASKED ? simd::keep_lanes(sum, bits + i * ld_bits, first + j) : sum;
        };
        if (left_over >= PANEL)
            tile_rows<TILE_VECTORS, false, false>(
                left, right, rows, rank_, 0, LANES, [=](int64_t i, int64_t j, int64_t, Float sum) {
                    simd::store(to + i * ld_out + j, simd::load(from + i * ld_dy + j) + scale * masked(i, j, sum));
                });
        else
            tile_rows<TILE_VECTORS, false, false>(
                left, right, rows, rank_, 0, LANES, [=](int64_t i, int64_t j, int64_t, Float sum) {
                    if (j >= left_over) return;
                    const Float value = simd::load_up_to(from + i * ld_dy + j, left_over - j);
                    simd::store_up_to(to + i * ld_out + j, value + scale * masked(i, j, sum), left_over - j);
                });
    }
}

void Update::add(const float* dy, int64_t ld_dy, int64_t row, int64_t rows, int64_t column, int64_t columns, float* out,
                 int64_t ld_out) const {
    if (bits_) add_panels<true>(dy, ld_dy, row, rows, column, columns, out, ld_out);
    else add_panels<false>(dy, ld_dy, row, rows, column, columns, out, ld_out);
}

}  // namespace skinny
