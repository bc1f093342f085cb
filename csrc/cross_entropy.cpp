// Cross-entropy over a shard of the vocabulary, in place; see triton_kernels/reference.py. One pass a function.
#include <algorithm>
#include <limits>

#include "common.h"
#include "simd.h"

namespace {

using simd::Float;
using simd::Int;
using simd::LANES;

constexpr float LOWEST = -std::numeric_limits<float>::infinity();

// NaN where there is a NaN, as torch's amax.
float row_max(const float* row, int64_t columns) {
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
        result = row[column] > result ? row[column] : result;
        nan = nan || row[column] != row[column];
    }
    return nan ? std::numeric_limits<float>::quiet_NaN() : result;
}

// row = exp(row - max); their sum.
float row_exponentials(float* row, int64_t columns, float max) {
    // Sums of short runs keep the error of a long row that of a short one.
    constexpr int64_t RUN = 256 * LANES;
    float total = 0.0f;
    for (int64_t first = 0; first < columns; first += RUN) {
        float* run = row + first;
        Float sums[4] = {};
        simd::for_each(std::min(RUN, columns - first), [&](auto which, int64_t column, int64_t count) {
            Float value = simd::exp(simd::load_up_to(run + column, count) - max);
            simd::store_up_to(run + column, value, count);
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

}  // namespace

// logits become exp(logits - maximum of the row). totals: their sums; target_logits: the target's logit, 0 where it is
// not in [0, columns).
EXPORT void engine_cross_entropy_statistics(int threads, int64_t tokens, int64_t columns, float* logits,
                                            int64_t ld_logits, const int64_t* targets, float* maxima, float* totals,
                                            float* target_logits) {
    for_rows(threads, tokens, columns, [=](int64_t t) {
        float* row = logits + t * ld_logits;
        const int64_t target = targets[t];
        target_logits[t] = target >= 0 && target < columns ? row[target] : 0.0f;
        maxima[t] = row_max(row, columns);
        totals[t] = row_exponentials(row, columns, maxima[t]);
    });
}

// exponentials become (exponentials / total - onehot(target)) * scale; targets not in [0, columns) lie elsewhere.
EXPORT void engine_cross_entropy_backward(int threads, int64_t tokens, int64_t columns, float* exponentials,
                                          int64_t ld_exponentials, const int64_t* targets, const float* totals,
                                          const float* scales) {
    for_rows(threads, tokens, columns, [=](int64_t t) {
        float* row = exponentials + t * ld_exponentials;
        const float factor = scales[t] / totals[t];
        simd::for_each(columns, [=](auto, int64_t column, int64_t count) {
            simd::store_up_to(row + column, simd::load_up_to(row + column, count) * factor, count);
        });
        if (targets[t] >= 0 && targets[t] < columns) row[targets[t]] -= scales[t];
    });
}
