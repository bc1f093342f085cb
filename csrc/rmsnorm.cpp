// RMSNorm: y = x * rstd * w, rstd = 1 / sqrt(mean(x^2) + eps) (Zhang & Sennrich, arXiv 1910.07467).
//
// Forward may add a residual first; backward may add the rank-r update of an adapter to dy before it is used, the
// residual stream's gradient to dx, and may leave out the weight's gradient.
#include <algorithm>
#include <cmath>

#include "common.h"
#include "simd.h"
#include "skinny.h"

namespace {

using simd::Float;
using simd::LANES;

constexpr int64_t ROWS = 8;  // rows of an item of work

// s = x + residual (kept in `sum`), then the norm of s.
void forward_row(const float* x, const float* residual, float* sum, const float* weight, float eps, int64_t features,
                 float* y, float* rstd) {
    Float squares[4] = {};
    simd::for_each(features, [&](auto which, int64_t f, int64_t count) {
        Float value = simd::load_up_to(x + f, count);
        if (residual) {
            value += simd::load_up_to(residual + f, count);
            simd::store_up_to(sum + f, value, count);
        }
        squares[which] += value * value;
    });
    const float mean = simd::sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / (float)features;
    const float r = 1.0f / std::sqrt(mean + eps);
    *rstd = r;
    const float* from = residual ? sum : x;
    simd::for_each(features, [=](auto, int64_t f, int64_t count) {
        const Float value = simd::load_up_to(from + f, count);
        simd::store_up_to(y + f, value * r * simd::load_up_to(weight + f, count), count);
    });
}

// dx = rstd * (g - xhat * mean(g * xhat)) + residual, g = dy * w, xhat = x * rstd; dw += dy * xhat.
void backward_row(const float* dy, const float* x, const float* weight, float rstd, const float* residual,
                  int64_t features, float* dx, float* dw) {
    Float products[4] = {};
    simd::for_each(features, [&](auto which, int64_t f, int64_t count) {
        const Float xhat = simd::load_up_to(x + f, count) * rstd, grad = simd::load_up_to(dy + f, count);
        products[which] += grad * simd::load_up_to(weight + f, count) * xhat;
        if (dw) simd::store_up_to(dw + f, simd::load_up_to(dw + f, count) + grad * xhat, count);
    });
    const float mean = simd::sum((products[0] + products[1]) + (products[2] + products[3])) / (float)features;
    if (!dx) return;
    simd::for_each(features, [=](auto, int64_t f, int64_t count) {
        const Float xhat = simd::load_up_to(x + f, count) * rstd;
        const Float g = simd::load_up_to(dy + f, count) * simd::load_up_to(weight + f, count);
        Float value = (g - xhat * mean) * rstd;
        if (residual) value += simd::load_up_to(residual + f, count);
        simd::store_up_to(dx + f, value, count);
    });
}

}  // namespace

// y, and sum = x + residual where `residual` is given (`sum` may be x or residual); rstd: [tokens].
EXPORT void engine_rmsnorm_forward(int threads, int64_t tokens, int64_t features, const float* x, int64_t ld_x,
                                   const float* residual, int64_t ld_residual, float* sum, int64_t ld_sum,
                                   const float* weight, float eps, float* y, int64_t ld_y, float* rstd) {
    common::parallel_for(threads, common::ceil_div(tokens, ROWS), [=](int64_t item) {
        for (int64_t t = item * ROWS; t < tokens && t < (item + 1) * ROWS; ++t)
            forward_row(x + t * ld_x, residual ? residual + t * ld_residual : nullptr, sum ? sum + t * ld_sum : nullptr,
                        weight, eps, features, y + t * ld_y, rstd + t);
    });
}

// dx (null: not wanted; may be dy or residual), and weight_gradient += (null: frozen). rank = 0: no update of dy.
EXPORT void engine_rmsnorm_backward(int threads, int64_t tokens, int64_t features, const float* dy, int64_t ld_dy,
                                    const float* x, int64_t ld_x, const float* weight, const float* rstd,
                                    const float* residual, int64_t ld_residual, int64_t rank, const float* dh,
                                    int64_t ld_dh, const float* a, int64_t ld_a, const uint8_t* bits, int64_t ld_bits,
                                    float scale, float* dx, int64_t ld_dx, float* weight_gradient) {
    const skinny::Update update(threads, features, rank, dh, ld_dh, a, ld_a, bits, ld_bits, scale);
    // The weight's gradient is summed in at most 32 parts whose rows depend on `tokens` only.
    const int64_t group = weight_gradient ? ROWS * (1 + (tokens - 1) / (ROWS * 32)) : ROWS;
    const int64_t groups = common::ceil_div(tokens, group);
    std::vector<float> parts(weight_gradient ? (size_t)(groups * features) : 0, 0.0f);
    float* partial = parts.data();
    common::parallel_for(threads, groups, [=, &update](int64_t item) {
        float* dw = weight_gradient ? partial + item * features : nullptr;
        const int64_t end = std::min(tokens, (item + 1) * group);
        for (int64_t first = item * group; first < end; first += ROWS) {
            const int64_t rows = std::min(ROWS, end - first);
            const float* grads = dy + first * ld_dy;
            int64_t ld = ld_dy;
            if (update.wanted()) {
                float* updated = common::scratch(ROWS * features);
                update.add(dy, ld_dy, first, rows, 0, features, updated, features);
                grads = updated;
                ld = features;
            }
            for (int64_t i = 0; i < rows; ++i) {
                const int64_t t = first + i;
                backward_row(grads + i * ld, x + t * ld_x, weight, rstd[t],
                             residual ? residual + t * ld_residual : nullptr, features, dx ? dx + t * ld_dx : nullptr,
                             dw);
            }
        }
    });
    for (int64_t item = 0; weight_gradient && item < groups; ++item)
        for (int64_t f = 0; f < features; ++f) weight_gradient[f] += partial[item * features + f];
}
