// SwiGLU: y = silu(gate) * up for [gate | up] side by side (Shazeer, arXiv 2002.05202).
//
// Backward recomputes the activation from its input, may add the rank-r update of an adapter on y to dy before it is
// used, and may write y once more. Beside the gradient of that adapter's A it is that of swiglu_adapted.cpp.
#include <algorithm>

#include "common.h"
#include "simd.h"
#include "skinny.h"
#include "swiglu.h"

namespace {

using simd::Float;
using swiglu::backward_row;

constexpr int64_t ROWS = 8;
constexpr int64_t COLUMNS = 768;  // of the updated dy that stays in the first cache: 8 rows of 3 KB

template <class T>
void forward(int threads, int64_t tokens, int64_t features, const T* gate_up, int64_t ld_gate_up, T* y, int64_t ld_y) {
    common::parallel_for(threads, common::ceil_div(tokens, ROWS), [=](int64_t item) {
        for (int64_t t = item * ROWS; t < tokens && t < (item + 1) * ROWS; ++t) {
            const T *gate = gate_up + t * ld_gate_up, *up = gate + features;
            T* to = y + t * ld_y;
            simd::for_each(features, [=](auto, int64_t f, int64_t count) {
                const Float g = simd::load_up_to(gate + f, count);
                simd::store_up_to(to + f, g * simd::sigmoid(g) * simd::load_up_to(up + f, count), count);
            });
        }
    });
}

template <class T>
void backward(int threads, int64_t tokens, int64_t features, const T* dy, int64_t ld_dy, const T* gate_up,
              int64_t ld_gate_up, const skinny::Update<T>& update, T* d_gate_up, int64_t ld_d_gate_up, T* y,
              int64_t ld_y) {
    common::parallel_for(threads, common::ceil_div(tokens, ROWS), [=, &update](int64_t item) {
        const int64_t first = item * ROWS, rows = std::min(ROWS, tokens - first);
        for (int64_t column = 0; column < features; column += COLUMNS) {
            const int64_t columns = std::min(COLUMNS, features - column);
            float* updated = common::scratch(ROWS * COLUMNS);
            if (update.wanted())
                update.add(dy + first * ld_dy + column, ld_dy, first, rows, column, columns, updated, COLUMNS);
            for (int64_t i = 0; i < rows; ++i) {
                const T* gate = gate_up + (first + i) * ld_gate_up + column;
                T* dgate = d_gate_up + (first + i) * ld_d_gate_up + column;
                T* again = y ? y + (first + i) * ld_y + column : nullptr;
                if (update.wanted())
                    backward_row(updated + i * COLUMNS, gate, gate + features, columns, dgate, dgate + features, again);
                else
                    backward_row(dy + (first + i) * ld_dy + column, gate, gate + features, columns, dgate,
                                 dgate + features, again);
            }
        }
    });
}

}  // namespace

EXPORT void engine_swiglu_forward(int threads, int type, int64_t tokens, int64_t features, const void* gate_up,
                                  int64_t ld_gate_up, void* y, int64_t ld_y) {
    simd::with_type(type, [=](auto zero) {
        using T = decltype(zero);
        forward(threads, tokens, features, (const T*)gate_up, ld_gate_up, (T*)y, ld_y);
    });
}
REPLAYED(engine_swiglu_forward)

// d_gate_up may be gate_up; y may be null. rank = 0: no update of dy.
EXPORT void engine_swiglu_backward(int threads, int type, int64_t tokens, int64_t features, const void* dy,
                                   int64_t ld_dy, const void* gate_up, int64_t ld_gate_up, int64_t rank,
                                   const void* dh, int64_t ld_dh, const void* a, int64_t ld_a, const uint8_t* bits,
                                   int64_t ld_bits, float scale, void* d_gate_up, int64_t ld_d_gate_up, void* y,
                                   int64_t ld_y) {
    simd::with_type(type, [=](auto zero) {
        using T = decltype(zero);
        const skinny::Update<T> update(threads, features, rank, (const T*)dh, ld_dh, (const T*)a, ld_a, bits, ld_bits,
                                       scale);
        backward(threads, tokens, features, (const T*)dy, ld_dy, (const T*)gate_up, ld_gate_up, update, (T*)d_gate_up,
                 ld_d_gate_up, (T*)y, ld_y);
    });
}
