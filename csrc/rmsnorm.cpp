// RMSNorm: y = x * rstd * w, rstd = 1 / sqrt(mean(x^2) + eps) (Zhang & Sennrich, arXiv 1910.07467).
//
// Backward may add the rank-r update of an adapter to dy before dy is used, and leaves out the gradient of a frozen
// weight.
#include <algorithm>
#include <cmath>

#include "common.h"
#include "simd.h"
#include "skinny.h"

namespace {

using simd::Float;
using simd::LANES;

constexpr int64_t ROWS = 8;  // rows of an item of work

template <class T>
void forward_row(const T* x, const float* weight, float eps, int64_t features, T* y, float* rstd) {
    Float squares[4] = {};
    simd::for_each(features, [&](auto which, int64_t f, int64_t count) {
        const Float value = simd::load_up_to(x + f, count);
        squares[which] += value * value;
    });
    const float mean = simd::sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / (float)features;
    const float r = 1.0f / std::sqrt(mean + eps);
    *rstd = r;
    simd::for_each(features, [=](auto, int64_t f, int64_t count) {
        const Float value = simd::load_up_to(x + f, count);
        simd::store_up_to(y + f, value * r * simd::load_up_to(weight + f, count), count);
    });
}

// dx = rstd * (g - xhat * mean(g * xhat)), g = dy * w, xhat = x * rstd; dw += dy * xhat.
template <class G, class T>
void backward_row(const G* dy, const T* x, const float* weight, float rstd, int64_t features, T* dx, float* dw) {
    Float products[4] = {};
    simd::for_each(features, [&](auto which, int64_t f, int64_t count) {
        const Float xhat = simd::load_up_to(x + f, count) * rstd, grad = simd::load_up_to(dy + f, count);
        products[which] += grad * simd::load_up_to(weight + f, count) * xhat;
        if (dw) simd::store_up_to(dw + f, simd::load_up_to(dw + f, count) + grad * xhat, count);
    });
    const float mean = simd::sum((products[0] + products[1]) + (products[2] + products[3])) / (float)features;
    simd::for_each(features, [=](auto, int64_t f, int64_t count) {
        const Float xhat = simd::load_up_to(x + f, count) * rstd;
        const Float g = simd::load_up_to(dy + f, count) * simd::load_up_to(weight + f, count);
        simd::store_up_to(dx + f, (g - xhat * mean) * rstd, count);
    });
}

template <class T>
void forward(int threads, int64_t tokens, int64_t features, const T* x, int64_t ld_x, const float* weight, float eps,
             T* y, int64_t ld_y, float* rstd) {
    common::parallel_for(threads, common::ceil_div(tokens, ROWS), [=](int64_t item) {
        for (int64_t t = item * ROWS; t < tokens && t < (item + 1) * ROWS; ++t)
            forward_row(x + t * ld_x, weight, eps, features, y + t * ld_y, rstd + t);
    });
}

template <class T>
void backward(int threads, int64_t tokens, int64_t features, const T* dy, int64_t ld_dy, const T* x, int64_t ld_x,
              const float* weight, const float* rstd, const skinny::Update<T>& update, T* dx, int64_t ld_dx,
              float* weight_gradient) {
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
            float* updated = update.wanted() ? common::scratch(ROWS * features) : nullptr;
            if (updated) update.add(dy + first * ld_dy, ld_dy, first, rows, 0, features, updated, features);
            for (int64_t i = 0; i < rows; ++i) {
                const int64_t t = first + i;
                T* to = dx + t * ld_dx;
                if (updated) backward_row(updated + i * features, x + t * ld_x, weight, rstd[t], features, to, dw);
                else backward_row(dy + t * ld_dy, x + t * ld_x, weight, rstd[t], features, to, dw);
            }
        }
    });
    for (int64_t item = 0; weight_gradient && item < groups; ++item)
        for (int64_t f = 0; f < features; ++f) weight_gradient[f] += partial[item * features + f];
}

}  // namespace

// y; weight and rstd [tokens] are fp32.
EXPORT void engine_rmsnorm_forward(int threads, int type, int64_t tokens, int64_t features, const void* x, int64_t ld_x,
                                   const float* weight, float eps, void* y, int64_t ld_y, float* rstd) {
    simd::with_type(type, [=](auto zero) {
        using T = decltype(zero);
        forward(threads, tokens, features, (const T*)x, ld_x, weight, eps, (T*)y, ld_y, rstd);
    });
}
REPLAYED(engine_rmsnorm_forward)

// dx, and weight_gradient += (null: frozen). rank = 0: no update of dy.
EXPORT void engine_rmsnorm_backward(int threads, int type, int64_t tokens, int64_t features, const void* dy,
                                    int64_t ld_dy, const void* x, int64_t ld_x, const float* weight, const float* rstd,
                                    int64_t rank, const void* dh, int64_t ld_dh, const void* a, int64_t ld_a,
                                    const uint8_t* bits, int64_t ld_bits, float scale, void* dx, int64_t ld_dx,
                                    float* weight_gradient) {
    simd::with_type(type, [=](auto zero) {
        using T = decltype(zero);
        const skinny::Update<T> update(threads, features, rank, (const T*)dh, ld_dh, (const T*)a, ld_a, bits, ld_bits,
                                       scale);
        backward(threads, tokens, features, (const T*)dy, ld_dy, (const T*)x, ld_x, weight, rstd, update, (T*)dx, ld_dx,
                 weight_gradient);
    });
}
