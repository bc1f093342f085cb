// Sums over tokens that give the gradients of adapters' factors, [ranks, columns] = left^T drop(right).
#pragma once

#include <algorithm>
#include <memory>

#include "common.h"
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

}  // namespace rank_sums
