// SwiGLU: y = silu(gate) * up for [gate | up] side by side (Shazeer, arXiv 2002.05202).
//
// Backward makes the activation again from its input, may add the rank-r update of an adapter on y to dy before it is
// used, and may write y once more for that adapter's own gradient.
#include <algorithm>

#include "common.h"
#include "simd.h"
#include "skinny.h"

namespace {

using simd::Float;

constexpr int64_t ROWS = 8;
constexpr int64_t COLUMNS = 768;  // of the updated dy that stays in the first cache: 8 rows of 3 KB

void backward_row(const float* dy, const float* gate, const float* up, int64_t features, float* dgate, float* dup,
                  float* y) {
    simd::for_each(features, [=](auto, int64_t f, int64_t count) {
        const Float g = simd::load_up_to(gate + f, count), u = simd::load_up_to(up + f, count);
        const Float grad = simd::load_up_to(dy + f, count);
        const Float s = simd::sigmoid(g), silu = g * s;
        // silu'(g) = s + silu (1 - s)
        simd::store_up_to(dgate + f, grad * u * (s + silu * (1.0f - s)), count);
        simd::store_up_to(dup + f, grad * silu, count);
        if (y) simd::store_up_to(y + f, silu * u, count);
    });
}

}  // namespace

EXPORT void engine_swiglu_forward(int threads, int64_t tokens, int64_t features, const float* gate_up,
                                  int64_t ld_gate_up, float* y, int64_t ld_y) {
    common::parallel_for(threads, common::ceil_div(tokens, ROWS), [=](int64_t item) {
        for (int64_t t = item * ROWS; t < tokens && t < (item + 1) * ROWS; ++t) {
            const float *gate = gate_up + t * ld_gate_up, *up = gate + features;
            float* to = y + t * ld_y;
            simd::for_each(features, [=](auto, int64_t f, int64_t count) {
                const Float g = simd::load_up_to(gate + f, count);
                simd::store_up_to(to + f, g * simd::sigmoid(g) * simd::load_up_to(up + f, count), count);
            });
        }
    });
}

// d_gate_up may be gate_up; y may be null. rank = 0: no update of dy.
EXPORT void engine_swiglu_backward(int threads, int64_t tokens, int64_t features, const float* dy, int64_t ld_dy,
                                   const float* gate_up, int64_t ld_gate_up, int64_t rank, const float* dh,
                                   int64_t ld_dh, const float* a, int64_t ld_a, const uint8_t* bits, int64_t ld_bits,
                                   float scale, float* d_gate_up, int64_t ld_d_gate_up, float* y, int64_t ld_y) {
    const skinny::Update update(threads, features, rank, dh, ld_dh, a, ld_a, bits, ld_bits, scale);
    common::parallel_for(threads, common::ceil_div(tokens, ROWS), [=, &update](int64_t item) {
        const int64_t first = item * ROWS, rows = std::min(ROWS, tokens - first);
        for (int64_t column = 0; column < features; column += COLUMNS) {
            const int64_t columns = std::min(COLUMNS, features - column);
            const float* grads = dy + first * ld_dy + column;
            int64_t ld = ld_dy;
            if (update.wanted()) {
                float* updated = common::scratch(ROWS * COLUMNS);
                update.add(dy, ld_dy, first, rows, column, columns, updated, COLUMNS);
                grads = updated;
                ld = COLUMNS;
            }
            for (int64_t i = 0; i < rows; ++i) {
                const float* gate = gate_up + (first + i) * ld_gate_up + column;
                float* dgate = d_gate_up + (first + i) * ld_d_gate_up + column;
                backward_row(grads + i * ld, gate, gate + features, columns, dgate, dgate + features,
                             y ? y + (first + i) * ld_y + column : nullptr);
            }
        }
    });
}
