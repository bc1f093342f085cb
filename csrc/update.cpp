// The rank-r update of a gradient, in register tiles; see skinny.h.
#include "skinny.h"

namespace skinny {

using simd::Bf16;

namespace {

Left as_left(const float* data, int64_t ld, int64_t, int64_t) { return {data, ld, 1}; }

Left as_left(const Bf16* data, int64_t ld, int64_t rows, int64_t columns) {
    float* wide = common::scratch<7>(rows * columns);
    simd::widen_rows(data, ld, rows, columns, wide, columns);
    return {wide, columns, 1};
}

}  // namespace

template <class T>
template <bool MASKED, class Out>
void Update<T>::add_panels(const T* dy, int64_t ld_dy, int64_t row, int64_t rows, int64_t column, int64_t columns,
                           Out* out, int64_t ld_out) const {
    const Left left = as_left(dh_ + row * ld_dh_, ld_dh_, rows, rank_);
    const float scale = scale_;
    const int64_t ld_bits = ld_bits_;
    for (int64_t c = 0; c < columns; c += PANEL) {
        const Right<float> right = {a_.panel(column + c), PANEL, nullptr, 0, false};
        const uint8_t* bits = MASKED ? bits_ + row * ld_bits : nullptr;
        const T* from = dy + c;
        Out* to = out + c;
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

#if HAS_PAIRS

template <class T>
template <bool MASKED, class Out>
void Update<T>::add_pairs(const T* dy, int64_t ld_dy, int64_t row, int64_t rows, int64_t column, int64_t columns,
                          Out* out, int64_t ld_out) const {
    static_assert(pairs::PANEL == 2 * PANEL, "what callers align their columns to");
    const int64_t ld_left = pairs::padded(rank_), depth = rank_ + rank_ % 2;
    Bf16* left = (Bf16*)common::scratch<7>(rows * ld_left / 2);
    pairs::copy_rows(rows, rank_, dh_ + row * ld_dh_, ld_dh_, nullptr, 0, left, ld_left);
    const float scale = scale_;
    const int64_t ld_bits = ld_bits_;
    for (int64_t c = 0; c < columns; c += pairs::PANEL) {
        const int64_t first = column + c, count = std::min(pairs::PANEL, columns - c);
        const int64_t next = c + pairs::PANEL < columns ? pairs::PANEL : rows * ld_dy - c;
        const T* from = dy + c;
        Out* to = out + c;
        const uint8_t* bits = MASKED ? bits_ + row * ld_bits : nullptr;
        const uint32_t* panel = pairs_->panel(first);
        const auto masked = [=](int64_t i, int64_t j, Float sum) {
            return MASKED ? simd::keep_lanes(sum, bits + i * ld_bits, first + j) : sum;
        };
        if (count == pairs::PANEL)
            pairs::product(rows, pairs::PANEL, depth, left, ld_left, panel, pairs::PANEL,
                           [=](int64_t i, int64_t j, Float sum) {
                               const T* given = from + i * ld_dy + j;
                               pairs::fetch(given + next);
                               pairs::put(to + i * ld_out + j, simd::load(given) + scale * masked(i, j, sum));
                           });
        else
            pairs::product(rows, pairs::padded(count, LANES), depth, left, ld_left, panel, pairs::PANEL,
                           [=](int64_t i, int64_t j, Float sum) {
                               const Float given = simd::load_up_to(from + i * ld_dy + j, count - j);
                               pairs::put_up_to(to + i * ld_out + j, given + scale * masked(i, j, sum), count - j);
                           });
    }
}

#endif

template <class T>
template <class Out>
void Update<T>::add(const T* dy, int64_t ld_dy, int64_t row, int64_t rows, int64_t column, int64_t columns, Out* out,
                    int64_t ld_out) const {
#if HAS_PAIRS
    if constexpr (std::is_same<T, Bf16>::value)
        if (pairs_) {
            if (bits_) add_pairs<true>(dy, ld_dy, row, rows, column, columns, out, ld_out);
            else add_pairs<false>(dy, ld_dy, row, rows, column, columns, out, ld_out);
            return;
        }
#endif
    if (bits_) add_panels<true>(dy, ld_dy, row, rows, column, columns, out, ld_out);
    else add_panels<false>(dy, ld_dy, row, rows, column, columns, out, ld_out);
}

template void Update<float>::add(const float*, int64_t, int64_t, int64_t, int64_t, int64_t, float*, int64_t) const;
template void Update<Bf16>::add(const Bf16*, int64_t, int64_t, int64_t, int64_t, int64_t, float*, int64_t) const;
template void Update<Bf16>::add(const Bf16*, int64_t, int64_t, int64_t, int64_t, int64_t, Bf16*, int64_t) const;

}  // namespace skinny
