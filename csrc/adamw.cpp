// AdamW (Loshchilov & Hutter, arXiv 1711.05101) on a flat fp32 shard, and the sum of squares that clipping needs.
//
// One pass: every number is read once and written once. Arithmetic as in torch's fused AdamW.
#include <algorithm>
#include <cmath>

#include "common.h"
#include "simd.h"

namespace {

using simd::Float;
using simd::LANES;

constexpr int64_t CHUNK = 16384;

// Nearest bf16, ties to even; NaN stays NaN.
uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}

}  // namespace

// clip, skip_flag and low_precision (bf16) may be null. `step_count` counts the updates before this one. Nothing but
// the gradient changes where *skip_flag is not 0. The gradient is left as 0 where `zero_gradient`.
EXPORT void engine_adamw(int threads, int64_t size, float* parameter, float* gradient, float* exp_avg,
                         float* exp_avg_sq, uint16_t* low_precision, const float* lr, const float* step_count,
                         const float* clip, const float* skip_flag, double beta1, double beta2, double eps,
                         double weight_decay, int zero_gradient) {
    const bool skip = skip_flag && *skip_flag != 0.0f;
    const double step = (double)*step_count + 1.0, rate = *lr;
    const float decay = (float)(1.0 - rate * weight_decay);
    const float step_size = (float)(rate / (1.0 - std::pow(beta1, step)));
    const float correction = (float)std::sqrt(1.0 - std::pow(beta2, step));
    const float weight1 = (float)(1.0 - beta1), keep2 = (float)beta2, weight2 = (float)(1.0 - beta2);
    const float epsilon = (float)eps, factor = clip ? *clip : 1.0f;
    common::parallel_for(threads, common::ceil_div(size, CHUNK), [=](int64_t item) {
        const int64_t end = std::min(size, (item + 1) * CHUNK);
        const int64_t begin = item * CHUNK;
        simd::for_each(skip ? 0 : end - begin, [=](auto, int64_t offset, int64_t count) {
            const int64_t i = begin + offset;
            const Float g = simd::load_up_to(gradient + i, count) * factor;
            Float m = simd::load_up_to(exp_avg + i, count), v = simd::load_up_to(exp_avg_sq + i, count);
            m = m + weight1 * (g - m);
            v = keep2 * v + weight2 * (g * g);
            const Float denominator = simd::sqrt(v) / correction + epsilon;
            const Float p = simd::load_up_to(parameter + i, count) * decay - step_size * m / denominator;
            simd::store_up_to(exp_avg + i, m, count);
            simd::store_up_to(exp_avg_sq + i, v, count);
            simd::store_up_to(parameter + i, p, count);
        });
        if (low_precision && !skip)
            for (int64_t i = begin; i < end; ++i) low_precision[i] = to_bf16(parameter[i]);
        if (zero_gradient) std::fill(gradient + begin, gradient + end, 0.0f);
    });
}

// Sum of squares: fp32 in runs of 16 vectors, fp64 above; chunks are added in order.
EXPORT void engine_square_sum(int threads, int64_t size, const float* values, double* result) {
    const int64_t chunks = common::ceil_div(size, CHUNK);
    std::vector<double> parts((size_t)chunks, 0.0);
    double* part = parts.data();
    common::parallel_for(threads, chunks, [=](int64_t item) {
        const int64_t end = std::min(size, (item + 1) * CHUNK);
        double total = 0.0;
        for (int64_t i = item * CHUNK; i < end; i += 16 * LANES) {
            Float squares[4] = {};
            for (int64_t k = 0; k < 16 && i + k * LANES < end; ++k) {
                const Float value = simd::load_up_to(values + i + k * LANES, end - i - k * LANES);
                squares[k & 3] += value * value;
            }
            total += (double)simd::sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
        }
        part[item] = total;
    });
    *result = 0.0;
    for (int64_t item = 0; item < chunks; ++item) *result += parts[(size_t)item];
}
