// Cross-entropy over a shard of the vocabulary, in place; see engine/kernels/reference.py. One pass a function.
#include <algorithm>
#include <limits>
#include <type_traits>

#include "common.h"
#include "simd.h"

namespace {

using simd::Float;
using simd::Int;
using simd::LANES;

constexpr float LOWEST = -std::numeric_limits<float>::infinity();

// NaN where there is a NaN, as torch's amax.
template <class T>
float row_max(const T* row, int64_t columns) {
    Float best[4] = {simd::splat(LOWEST), simd::splat(LOWEST), simd::splat(LOWEST), simd::splat(LOWEST)};
    Int unordered = {};
    int64_t column = 0;
    for (; column + 4 * LANES <= columns; column += 4 * LANES)
        for (int i = 0; i < 4; ++i) {
            const Float value = simd::load(row + column + i * LANES);
            best[i] = value > best[i] ? value : best[i];
            unordered |= value != value;
        }
    float result = LOWEST;
    bool nan = false;
    for (int i = 0; i < 4; ++i)
        for (int lane = 0; lane < LANES; ++lane) {
            result = best[i][lane] > result ? best[i][lane] : result;
            nan = nan || unordered[lane];
        }
    for (; column < columns; ++column) {
        const float value = simd::to_float(row[column]);
        result = value > result ? value : result;
        nan = nan || value != value;
    }
    return nan ? std::numeric_limits<float>::quiet_NaN() : result;
}

// exponentials = exp(row - max) where they are wanted (it may be row); their sum.
template <class T>
float row_exponentials(const T* row, int64_t columns, float max, float* exponentials) {
    // Sums of short runs keep the error of a long row that of a short one.
    constexpr int64_t RUN = 256 * LANES;
    float total = 0.0f;
    for (int64_t first = 0; first < columns; first += RUN) {
        const T* run = row + first;
        Float sums[4] = {};
        simd::for_each(std::min(RUN, columns - first), [&](auto which, int64_t column, int64_t count) {
            Float value = simd::exp(simd::load_up_to(run + column, count) - max);
            if (exponentials) simd::store_up_to(exponentials + first + column, value, count);
            for (int64_t i = count; i < LANES; ++i) value[i] = 0.0f;
            sums[which] += value;
        });
        total += simd::sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    }
    return total;
}

// A few thousand logits an item of work.
int64_t rows_of_item(int64_t columns) { return 1 + 8192 / (columns + 1); }

template <class Work>
void for_rows(int threads, int64_t tokens, int64_t columns, Work work) {
    const int64_t rows = rows_of_item(columns);
    common::parallel_for(threads, common::ceil_div(tokens, rows), [=](int64_t item) {
        for (int64_t t = item * rows; t < tokens && t < (item + 1) * rows; ++t) work(t);
    });
}

// (exponential / total - onehot(target)) * scale.
void finish_row(float* row, int64_t columns, int64_t target, float total, float scale) {
    const float factor = scale / total;
    simd::for_each(columns, [=](auto, int64_t column, int64_t count) {
        simd::store_up_to(row + column, simd::load_up_to(row + column, count) * factor, count);
    });
    if (target >= 0 && target < columns) row[target] -= scale;
}

// The same from logits, whose exponentials would be rounded once more if they had been kept.
void finish_row(simd::Bf16* row, int64_t columns, int64_t target, float maximum, float total, float scale) {
    const float factor = scale / total;
    const bool here = target >= 0 && target < columns;
    const float logit = here ? simd::to_float(row[target]) : 0.0f;
    simd::for_each(columns, [=](auto, int64_t column, int64_t count) {
        simd::store_up_to(row + column, simd::exp(simd::load_up_to(row + column, count) - maximum) * factor, count);
    });
    if (here) simd::store_one(row + target, simd::exp(simd::splat(logit - maximum))[0] * factor - scale);
}

}  // namespace

// maxima of the rows; totals: sums of exp(logit - maximum); target_logits: the target's logit, 0 where it is not in
// [0, columns). fp32 logits become exp(logit - maximum), bfloat16 logits stay as they are.
EXPORT void engine_cross_entropy_statistics(int threads, int type, int64_t tokens, int64_t columns, void* logits,
                                            int64_t ld_logits, const int64_t* targets, float* maxima, float* totals,
                                            float* target_logits) {
    simd::with_type(type, [=](auto zero) {
        using T = decltype(zero);
        for_rows(threads, tokens, columns, [=](int64_t t) {
            T* row = (T*)logits + t * ld_logits;
            const int64_t target = targets[t];
            target_logits[t] = target >= 0 && target < columns ? simd::to_float(row[target]) : 0.0f;
            maxima[t] = row_max(row, columns);
            float* exponentials = nullptr;
            if constexpr (std::is_same<T, float>::value) exponentials = row;
            totals[t] = row_exponentials(row, columns, maxima[t], exponentials);
        });
    });
}
REPLAYED(engine_cross_entropy_statistics)

// What statistics left becomes (exp(logit - maximum) / total - onehot(target)) * scale; maxima are those of this shard
// and totals are relative to them; targets not in [0, columns) lie elsewhere.
EXPORT void engine_cross_entropy_backward(int threads, int type, int64_t tokens, int64_t columns, void* left,
                                          int64_t ld_left, const int64_t* targets, const float* maxima,
                                          const float* totals, const float* scales) {
    simd::with_type(type, [=](auto zero) {
        using T = decltype(zero);
        for_rows(threads, tokens, columns, [=](int64_t t) {
            T* row = (T*)left + t * ld_left;
            if constexpr (std::is_same<T, float>::value) finish_row(row, columns, targets[t], totals[t], scales[t]);
            else finish_row(row, columns, targets[t], maxima[t], totals[t], scales[t]);
        });
    });
}
