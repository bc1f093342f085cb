// SwiGLU of a row: y = silu(gate) * up (Shazeer, arXiv 2002.05202), backward.
#pragma once

#include "simd.h"

namespace swiglu {

// dgate and dup, and y once more where it is not null.
template <class G, class T, class Y>
void backward_row(const G* dy, const T* gate, const T* up, int64_t features, T* dgate, T* dup, Y* y) {
    using simd::Float;
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

}  // namespace swiglu
