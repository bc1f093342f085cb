// RMSNorm of a head, gated: y = x rstd w silu(z), rstd = 1 / sqrt(mean(x^2) + eps).
#include <algorithm>
#include <cmath>

#include "common.h"
#include "heads.h"
#include "simd.h"

namespace {

using heads::Heads;
using simd::Float;

constexpr int64_t ROWS = 8;  // tokens of an item of work

template <class T>
float reciprocal_rms(const T* x, int64_t features, float eps) {
    Float squares[4] = {};
    simd::for_each(features, [&](auto which, int64_t f, int64_t count) {
        const Float value = simd::load_up_to(x + f, count);
        squares[which] += value * value;
    });
    const float mean = simd::sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / (float)features;
    return 1.0f / std::sqrt(mean + eps);
}

template <class T>
void forward_row(const T* x, const T* z, const float* weight, float eps, int64_t features, T* y) {
    const float rstd = reciprocal_rms(x, features, eps);
    simd::for_each(features, [=](auto, int64_t f, int64_t count) {
        const Float gate = simd::load_up_to(z + f, count);
        const Float normed = simd::load_up_to(x + f, count) * rstd * simd::load_up_to(weight + f, count);
        simd::store_up_to(y + f, normed * (gate * simd::sigmoid(gate)), count);
    });
}

// dx = rstd (g - xhat mean(g xhat)), g = dy silu(z) w; dz = dy xhat w silu'(z); dw += dy silu(z) xhat.
template <class T>
void backward_row(const T* dy, const T* x, const T* z, const float* weight, float eps, int64_t features, T* dx, T* dz,
                  float* dw, float* g) {
    const float rstd = reciprocal_rms(x, features, eps);
    Float products[4] = {};
    simd::for_each(features, [&](auto which, int64_t f, int64_t count) {
        const Float xhat = simd::load_up_to(x + f, count) * rstd, gate = simd::load_up_to(z + f, count);
        const Float w = simd::load_up_to(weight + f, count), grad = simd::load_up_to(dy + f, count);
        const Float s = simd::sigmoid(gate), silu = gate * s, gated = grad * silu;
        simd::store_up_to(dz + f, grad * xhat * w * (s + silu * (1.0f - s)), count);
        if (dw) simd::store_up_to(dw + f, simd::load_up_to(dw + f, count) + gated * xhat, count);
        simd::store_up_to(g + f, gated * w, count);
        products[which] += gated * w * xhat;
    });
    const float mean = simd::sum((products[0] + products[1]) + (products[2] + products[3])) / (float)features;
    simd::for_each(features, [=](auto, int64_t f, int64_t count) {
        const Float xhat = simd::load_up_to(x + f, count) * rstd;
        simd::store_up_to(dx + f, (simd::load_up_to(g + f, count) - xhat * mean) * rstd, count);
    });
}

}  // namespace

// y [tokens, heads, features] without gaps.
EXPORT void engine_gated_norm_forward(int threads, int type, int64_t tokens, int64_t heads, int64_t features,
                                      const void* x, int64_t token_x, int64_t head_x, const void* z, int64_t token_z,
                                      int64_t head_z, const float* weight, float eps, void* y) {
    simd::with_type(type, [=](auto zero) {
        using T = decltype(zero);
        const Heads<const T> from = {(const T*)x, token_x, head_x}, gate = {(const T*)z, token_z, head_z};
        common::parallel_for(threads, common::ceil_div(tokens, ROWS), [=](int64_t item) {
            for (int64_t t = item * ROWS; t < std::min(tokens, (item + 1) * ROWS); ++t)
                for (int64_t h = 0; h < heads; ++h)
                    forward_row(from.at(t, h), gate.at(t, h), weight, eps, features,
                                (T*)y + (t * heads + h) * features);
        });
    });
}
REPLAYED(engine_gated_norm_forward)

// dx and dz without gaps; adds to weight_gradient, which may be null.
EXPORT void engine_gated_norm_backward(int threads, int type, int64_t tokens, int64_t heads, int64_t features,
                                       const void* dy, int64_t token_dy, int64_t head_dy, const void* x,
                                       int64_t token_x, int64_t head_x, const void* z, int64_t token_z, int64_t head_z,
                                       const float* weight, float eps, void* dx, void* dz, float* weight_gradient) {
    simd::with_type(type, [=](auto zero) {
        using T = decltype(zero);
        const Heads<const T> grad = {(const T*)dy, token_dy, head_dy}, from = {(const T*)x, token_x, head_x};
        const Heads<const T> gate = {(const T*)z, token_z, head_z};
        // The weight's gradient is summed in at most 32 parts whose rows depend on `tokens` only.
        const int64_t group = std::max(ROWS, common::ceil_div(tokens, 32)), groups = common::ceil_div(tokens, group);
        std::vector<float> parts(weight_gradient ? (size_t)(groups * features) : 0, 0.0f);
        float* partial = parts.data();
        common::parallel_for(threads, groups, [=](int64_t item) {
            float* dw = weight_gradient ? partial + item * features : nullptr;
            float* g = common::scratch(features);
            for (int64_t t = item * group; t < std::min(tokens, (item + 1) * group); ++t)
                for (int64_t h = 0; h < heads; ++h) {
                    const int64_t at = (t * heads + h) * features;
                    backward_row(grad.at(t, h), from.at(t, h), gate.at(t, h), weight, eps, features, (T*)dx + at,
                                 (T*)dz + at, dw, g);
                }
        });
        for (int64_t item = 0; weight_gradient && item < groups; ++item)
            for (int64_t f = 0; f < features; ++f) weight_gradient[f] += partial[item * features + f];
    });
}
