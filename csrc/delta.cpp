// The gated delta rule within pieces, forward and backward (recurrence.h).
#include "recurrence_backward.h"
#include "recurrence_forward.h"

namespace {

using recurrence::Gradients;
using recurrence::Inputs;
using recurrence::Shape;

// Calls work with a forward or a backward, whose last argument says whether each channel decays by itself.
template <template <class, bool, bool> class Pass, class T, class Work>
void with_kind(bool channels, const Shape& shape, const Inputs<T>& inputs, const Work& work) {
    if (channels) work(Pass<T, true, true>(shape, inputs));
    else work(Pass<T, true, false>(shape, inputs));
}

}  // namespace

// Queries and keys are normalised first, queries scaled. pieces: [num, 5] first token, length, indices of the received,
// the sent and the first kept state. decay: [tokens, heads] or, if channels, [tokens, heads, key]. kept may be null.
EXPORT void engine_delta_forward(int threads, int type, int64_t num, const int64_t* pieces, int64_t tokens,
                                 int64_t groups, int64_t heads, int64_t key, int64_t value, float scale, int channels,
                                 const void* q, int64_t token_q, int64_t head_q, const void* k, int64_t token_k,
                                 int64_t head_k, const void* v, int64_t token_v, int64_t head_v, const float* decay,
                                 const float* beta, const float* initial, void* out, int64_t token_out, int64_t head_out,
                                 float* final, float* kept) {
    simd::with_type(type, [=](auto zero) {
        using T = decltype(zero);
        const Inputs<T> inputs = {{(const T*)q, token_q, head_q}, {(const T*)k, token_k, head_k},
                                  {(const T*)v, token_v, head_v}, decay, beta, nullptr, nullptr};
        const Shape shape = {tokens, groups, heads, key, value, scale};
        with_kind<recurrence::Forward>(channels, shape, inputs, [&](const auto& pass) {
            pass.run(threads, recurrence::read_pieces(num, pieces), initial, {(T*)out, token_out, head_out}, final, kept);
        });
    });
}
REPLAYED(engine_delta_forward)

// d_final, initial and d_initial may be null.
EXPORT void engine_delta_backward(int threads, int type, int64_t num, const int64_t* pieces, int64_t tokens,
                                  int64_t groups, int64_t heads, int64_t key, int64_t value, float scale, int channels,
                                  const void* q, int64_t token_q, int64_t head_q, const void* k, int64_t token_k,
                                  int64_t head_k, const void* v, int64_t token_v, int64_t head_v, const float* decay,
                                  const float* beta, const float* initial, const void* d_out, int64_t token_out,
                                  int64_t head_out, const float* d_final, const float* kept, void* dq, void* dk,
                                  void* dv, float* ddecay, float* dbeta, float* d_initial) {
    simd::with_type(type, [=](auto zero) {
        using T = decltype(zero);
        const Inputs<T> inputs = {{(const T*)q, token_q, head_q}, {(const T*)k, token_k, head_k},
                                  {(const T*)v, token_v, head_v}, decay, beta, nullptr, nullptr};
        const Gradients<T> to = {{(T*)dq, groups * key, key}, {(T*)dk, groups * key, key},
                                 {(T*)dv, heads * value, value}, ddecay, dbeta, nullptr, nullptr, d_final, d_initial};
        const Shape shape = {tokens, groups, heads, key, value, scale};
        with_kind<recurrence::Backward>(channels, shape, inputs, [&](const auto& pass) {
            pass.run(threads, recurrence::read_pieces(num, pieces), initial, kept,
                     {(const T*)d_out, token_out, head_out}, to);
        });
    });
}
