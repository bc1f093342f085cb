// Sums over tokens that give the gradients of adapters' factors, [ranks, columns] = left^T drop(right).
#pragma once

#include <algorithm>
#include <memory>
#include <type_traits>

#include "common.h"
#include "pairs.h"
#include "simd.h"
#include "skinny.h"

namespace rank_sums {

// One adapter of a stack: its rows of the stacked A, its columns of the output, and where its gradient is added to.
struct Section {
    int64_t first_rank, num_ranks, first_column, num_columns;
    float* gradient;
    int64_t ld_gradient;
    double scale;
};

// out[r, c] += sum over `rows` of left[t, r] * drop(right)[t, c]; out is [ranks, ld_out].
template <class T>
void add_rows(int64_t rows, int64_t ranks, int64_t columns, const skinny::Left& left, const skinny::Right<T>& right,
              float* out, int64_t ld_out) {
    skinny::product(left, right, ranks, columns, rows, [=](int64_t i, int64_t j, int64_t count, simd::Float sum) {
        float* to = out + i * ld_out + j;
        simd::store_up_to(to, simd::load_up_to(to, count) + sum, count);
    });
}

#if HAS_PAIRS

// The same for bfloat16 numbers and `left` [ranks, rows], by pairs of rows.
inline void add_pairs(int64_t rows, int64_t ranks, int64_t columns, const simd::Bf16* left, int64_t ld_left,
                      const simd::Bf16* right, int64_t ld_right, const uint8_t* bits, int64_t ld_bits, float* out,
                      int64_t ld_out) {
    constexpr int64_t DEPTH = 64, WIDTH = 256;  // 32 KiB of interleaved rows stay in the first cache
    uint32_t* mixed = (uint32_t*)common::scratch<9>(DEPTH / 2 * WIDTH);
    for (int64_t t = 0; t < rows; t += DEPTH)
        for (int64_t c = 0; c < columns; c += WIDTH) {
            const int64_t depth = std::min(DEPTH, rows - t), width = std::min(WIDTH, columns - c);
            const uint8_t* some = bits ? bits + t * ld_bits + c / 8 : nullptr;
            const int64_t next = c + WIDTH < columns ? WIDTH : DEPTH * ld_right - c;
            pairs::interleave(depth, width, right + t * ld_right + c, ld_right, some, ld_bits, mixed, WIDTH, next);
            pairs::add_product(ranks, pairs::padded(width, simd::LANES), pairs::padded(depth), left + t, ld_left,
                                 mixed, WIDTH, out + c, ld_out);
        }
}

#endif

constexpr int64_t COLUMNS = 64;  // whose groups are added at a time

// to[i] += scale * sum of groups, in order, for `columns` <= COLUMNS of one rank: column i of a group's sum lies at
// sums[i], that of the next group `next` later; to[i] lies at to[i * ld].
inline void add_groups(int64_t groups, const float* sums, int64_t next, int64_t columns, float scale, float* to,
                       int64_t ld) {
    float total[COLUMNS] = {};
    for (int64_t group = 0; group < groups; ++group, sums += next)
        for (int64_t i = 0; i < columns; ++i) total[i] += sums[i];
    for (int64_t i = 0; i < columns; ++i) to[i * ld] += scale * total[i];
}

// A narrow matrix as floats, its rows times `scale` where given: itself, or a copy.
class Wide {
  public:
    Wide(int threads, int64_t rows, int64_t columns, const float* from, int64_t ld_from, const float* scale = nullptr)
        : data(from), ld(ld_from) {
        if (scale) copy(threads, rows, columns, from, ld_from, scale);
    }
    Wide(int threads, int64_t rows, int64_t columns, const simd::Bf16* from, int64_t ld_from,
         const float* scale = nullptr) {
        copy(threads, rows, columns, from, ld_from, scale);
    }
    const float* data;
    int64_t ld;

  private:
    template <class T>
    void copy(int threads, int64_t rows, int64_t columns, const T* from, int64_t ld_from, const float* scale) {
        memory_.reset(new float[(size_t)(rows * columns)]);
        float* to = memory_.get();
        data = to, ld = columns;
        constexpr int64_t SOME = 1024;
        common::parallel_for(threads, common::ceil_div(rows, SOME), [=](int64_t item) {
            const int64_t first = item * SOME, some = std::min(SOME, rows - first);
            simd::widen_rows(from + first * ld_from, ld_from, some, columns, to + first * columns, columns);
            for (int64_t t = first; scale && t < first + some; ++t)
                for (int64_t c = 0; c < columns; ++c) to[t * columns + c] *= scale[t];
        });
    }

    std::unique_ptr<float[]> memory_;
};

// The left factor of such sums, a narrow matrix [tokens, ranks], its rows times `scale` where given.
template <class T>
class Factor {
  public:
    Factor(int threads, int64_t tokens, int64_t ranks, const T* from, int64_t ld, const float* scale = nullptr) {
#if HAS_PAIRS
        if constexpr (std::is_same<T, simd::Bf16>::value)
            if (pairs::found()) {
                pairs_.reset(new pairs::Transposed(threads, tokens, ranks, from, ld, scale));
                return;
            }
#endif
        wide_.reset(new Wide(threads, tokens, ranks, from, ld, scale));
    }

    // out[r, c] += sum over rows t of this[first + t, first_rank + r] * drop(right)[t, c]; out is [ranks, ld_out], and
    // may be written up to the end of the last vector. `first` is a multiple of 32. Rows that are `far` lie apart and
    // are not in the cache.
    void add(int64_t first, int64_t rows, int64_t first_rank, int64_t ranks, int64_t columns, const T* right,
             int64_t ld, const uint8_t* bits, int64_t ld_bits, bool far, float* out, int64_t ld_out) const {
#if HAS_PAIRS
        if constexpr (std::is_same<T, simd::Bf16>::value)
            if (pairs_) {
                const simd::Bf16* left = pairs_->data + first_rank * pairs_->ld + first;
                add_pairs(rows, ranks, columns, left, pairs_->ld, right, ld, bits, ld_bits, out, ld_out);
                return;
            }
#endif
        constexpr int64_t DEPTH = 32;  // products added up in registers before they join the sum
        for (int64_t t = 0; t < rows; t += DEPTH) {
            const skinny::Left l = {wide_->data + (first + t) * wide_->ld + first_rank, 1, wide_->ld};
            const skinny::Right<T> r = {right + t * ld, ld, bits ? bits + t * ld_bits : nullptr, ld_bits, far};
            add_rows(std::min(DEPTH, rows - t), ranks, columns, l, r, out, ld_out);
        }
    }

  private:
    std::unique_ptr<Wide> wide_;
#if HAS_PAIRS
    std::unique_ptr<pairs::Transposed> pairs_;
#endif
};

}  // namespace rank_sums
