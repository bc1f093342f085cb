// The state space of Mamba2 within pieces, forward and backward (recurrence.h).
//
//     h_t = exp(dt_t a) h_{t-1} + dt_t x_t b_t^T        y_t = h_t c_t + d x_t
#include "recurrence_backward.h"
#include "recurrence_forward.h"

namespace {

using recurrence::Gradients;
using recurrence::Inputs;

// Adds the pieces' parts, in order.
void sum_pieces(const float* parts, int64_t pieces, int64_t heads, float* to) {
    std::fill(to, to + heads, 0.0f);
    for (int64_t piece = 0; piece < pieces; ++piece)
        for (int64_t head = 0; head < heads; ++head) to[head] += parts[piece * heads + head];
}

}  // namespace

// x [tokens, heads, value], b and c [tokens, groups, key]; dt [tokens, heads], a and d [heads]; d may be null. States
// are [heads, value, key]. The rest is as of engine_delta_forward.
EXPORT void engine_ssd_forward(int threads, int type, int64_t num, const int64_t* pieces, int64_t tokens, int64_t groups,
                               int64_t heads, int64_t key, int64_t value, const void* c, int64_t token_c,
                               int64_t head_c, const void* b, int64_t token_b, int64_t head_b, const void* x,
                               int64_t token_x, int64_t head_x, const float* dt, const float* a, const float* d,
                               const float* initial, void* y, float* final, float* kept) {
    simd::with_type(type, [=](auto zero) {
        using T = decltype(zero);
        const Inputs<T> inputs = {{(const T*)c, token_c, head_c}, {(const T*)b, token_b, head_b},
                                  {(const T*)x, token_x, head_x}, nullptr, dt, a, d};
        recurrence::Forward<T, false, false>({tokens, groups, heads, key, value, 1.0f}, inputs)
            .run(threads, recurrence::read_pieces(num, pieces), initial, {(T*)y, heads * value, value}, final, kept);
    });
}
REPLAYED(engine_ssd_forward)

EXPORT void engine_ssd_backward(int threads, int type, int64_t num, const int64_t* pieces, int64_t tokens,
                                int64_t groups, int64_t heads, int64_t key, int64_t value, const void* c,
                                int64_t token_c, int64_t head_c, const void* b, int64_t token_b, int64_t head_b,
                                const void* x, int64_t token_x, int64_t head_x, const float* dt, const float* a,
                                const float* d, const float* initial, const void* dy, int64_t token_dy, int64_t head_dy,
                                const float* d_final, const float* kept, void* dc, void* db, void* dx, float* ddt,
                                float* da, float* dd, float* d_initial) {
    simd::with_type(type, [=](auto zero) {
        using T = decltype(zero);
        const Inputs<T> inputs = {{(const T*)c, token_c, head_c}, {(const T*)b, token_b, head_b},
                                  {(const T*)x, token_x, head_x}, nullptr, dt, a, d};
        std::vector<float> rates((size_t)(num * heads)), skips((size_t)(num * heads));
        const Gradients<T> to = {{(T*)dc, groups * key, key}, {(T*)db, groups * key, key},
                                 {(T*)dx, heads * value, value}, nullptr, ddt, rates.data(), skips.data(), d_final,
                                 d_initial};
        recurrence::Backward<T, false, false>({tokens, groups, heads, key, value, 1.0f}, inputs)
            .run(threads, recurrence::read_pieces(num, pieces), initial, kept, {(const T*)dy, token_dy, head_dy}, to);
        sum_pieces(rates.data(), num, heads, da);
        if (dd) sum_pieces(skips.data(), num, heads, dd);
    });
}
