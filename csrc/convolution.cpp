// A short causal convolution of each channel by itself, within pieces of a row, and silu:
//
//     y_t = act(b + sum over w of weight_w x_{t - W + 1 + w})      dx_t = sum over j of weight_{W - 1 - j} dz_{t + j}
//
// An item of work is some channels with all tokens: the weight's gradient is then one sum, and the last W rows of them
// stay in the first cache. What comes before a piece is its tail where it has one, else zeros.
#include <algorithm>
#include <vector>

#include "common.h"
#include "simd.h"

namespace {

using simd::Float;
using simd::LANES;

constexpr int64_t CHANNELS = 256;  // of an item

struct Shape {
    int64_t channels, taps;
    bool silu;
};

// First token, length, index of the tail or -1.
struct Piece {
    int64_t first, length, tail;
};

std::vector<Piece> read_pieces(int64_t count, const int64_t* values) {
    std::vector<Piece> pieces;
    for (const int64_t* v = values; v < values + 5 * count; v += 5) pieces.push_back({v[0], v[1], v[2]});
    return pieces;
}

// Channels [first, first + count) of a call.
template <class T>
class Channels {
  public:
    Channels(const Shape& shape, int64_t first, const T* x, int64_t ld_x, const T* tail, const float* weight,
             const float* bias)
        : count(std::min(CHANNELS, shape.channels - first)), shape_(shape), first_(first), x_(x), ld_x_(ld_x),
          tail_(tail), bias_(bias) {
        weight_ = common::scratch<0>(shape.taps * CHANNELS);
        for (int64_t w = 0; w < shape.taps; ++w)
            for (int64_t c = 0; c < count; ++c) weight_[w * CHANNELS + c] = weight[(first + c) * shape.taps + w];
    }

    // The rows that the taps of token `t` of a piece read; null for zeros.
    void rows(const Piece& piece, int64_t t, const T** to) const {
        for (int64_t w = 0; w < shape_.taps; ++w) {
            const int64_t from = t - shape_.taps + 1 + w;
            if (from >= 0) to[w] = x_ + (piece.first + from) * ld_x_ + first_;
            else if (piece.tail < 0) to[w] = nullptr;
            else to[w] = tail_ + (piece.tail * (shape_.taps - 1) + from + shape_.taps - 1) * shape_.channels + first_;
        }
    }

    SIMD_INLINE Float sum(const T* const* rows, int64_t c, int64_t lanes) const {
        Float sum = bias_ ? simd::load_up_to(bias_ + first_ + c, lanes) : Float{};
        for (int64_t w = 0; w < shape_.taps; ++w)
            if (rows[w]) sum += simd::load_up_to(rows[w] + c, lanes) * simd::load_up_to(weight_ + w * CHANNELS + c, lanes);
        return sum;
    }

    SIMD_INLINE Float weight(int64_t tap, int64_t c, int64_t lanes) const {
        return simd::load_up_to(weight_ + tap * CHANNELS + c, lanes);
    }

    const int64_t count;

  private:
    const Shape& shape_;
    int64_t first_;
    const T* x_;
    int64_t ld_x_;
    const T* tail_;
    const float* bias_;
    float* weight_;
};

template <class T>
void forward(int threads, const std::vector<Piece>& pieces, const Shape& shape, const T* x, int64_t ld_x,
             const float* weight, const float* bias, const T* tail, T* y) {
    common::parallel_for(threads, common::ceil_div(shape.channels, CHANNELS), [&](int64_t item) {
        const Channels<T> channels(shape, item * CHANNELS, x, ld_x, tail, weight, bias);
        std::vector<const T*> rows((size_t)shape.taps);
        for (const Piece& piece : pieces)
            for (int64_t t = 0; t < piece.length; ++t) {
                channels.rows(piece, t, rows.data());
                T* to = y + (piece.first + t) * shape.channels + item * CHANNELS;
                simd::for_each(channels.count, [&](auto, int64_t c, int64_t lanes) {
                    const Float z = channels.sum(rows.data(), c, lanes);
                    simd::store_up_to(to + c, shape.silu ? z * simd::sigmoid(z) : z, lanes);
                });
            }
    });
}

template <class T>
struct Gradients {
    T *dx, *d_tail;  // d_tail may be null
    float *weight, *bias;  // added to; may be null
};

template <class T>
void backward(int threads, const std::vector<Piece>& pieces, const Shape& shape, const T* dy, int64_t ld_dy, const T* x,
              int64_t ld_x, const float* weight, const float* bias, const T* tail, const Gradients<T>& to) {
    const int64_t taps = shape.taps;
    common::parallel_for(threads, common::ceil_div(shape.channels, CHANNELS), [&](int64_t item) {
        const int64_t first = item * CHANNELS;
        const Channels<T> channels(shape, first, x, ld_x, tail, weight, bias);
        // dz of the last tokens, by their number modulo W; and the sums of the weight's and the bias' gradients
        float* dz = common::scratch<1>(taps * CHANNELS);
        float* sums = common::scratch<2>((taps + 1) * CHANNELS);
        std::fill(sums, sums + (taps + 1) * CHANNELS, 0.0f);
        std::vector<const T*> rows((size_t)taps);
        for (const Piece& piece : pieces) {
            const int64_t before = piece.tail < 0 ? 0 : taps - 1;
            for (int64_t t = 0; t < piece.length + taps - 1; ++t) {
                float* here = dz + t % taps * CHANNELS;
                if (t < piece.length) {
                    channels.rows(piece, t, rows.data());
                    const T* from = dy + (piece.first + t) * ld_dy + first;
                    simd::for_each(channels.count, [&](auto, int64_t c, int64_t lanes) {
                        Float grad = simd::load_up_to(from + c, lanes);
                        if (shape.silu) {
                            const Float z = channels.sum(rows.data(), c, lanes), s = simd::sigmoid(z), silu = z * s;
                            grad *= s + silu * (1.0f - s);
                        }
                        simd::store_up_to(here + c, grad, lanes);
                        const auto add = [&](float* sum, Float value) {
                            simd::store_up_to(sum + c, simd::load_up_to(sum + c, lanes) + value, lanes);
                        };
                        for (int64_t w = 0; to.weight && w < taps; ++w)
                            if (rows[w]) add(sums + w * CHANNELS, grad * simd::load_up_to(rows[w] + c, lanes));
                        if (to.bias) add(sums + taps * CHANNELS, grad);
                    });
                }
                // token t - W + 1 is read by none after t; those before the piece lie in its tail
                const int64_t done = t - taps + 1;
                if (done < -before || done >= piece.length) continue;
                T* out = done >= 0 ? to.dx + (piece.first + done) * shape.channels + first
                                   : to.d_tail + (piece.tail * (taps - 1) + done + taps - 1) * shape.channels + first;
                simd::for_each(channels.count, [&](auto, int64_t c, int64_t lanes) {
                    Float sum = {};
                    for (int64_t j = std::max<int64_t>(0, -done); j < taps && done + j < piece.length; ++j)
                        sum += channels.weight(taps - 1 - j, c, lanes) *
                               simd::load_up_to(dz + (done + j) % taps * CHANNELS + c, lanes);
                    simd::store_up_to(out + c, sum, lanes);
                });
            }
        }
        for (int64_t c = 0; c < channels.count; ++c) {
            for (int64_t w = 0; to.weight && w < taps; ++w) to.weight[(first + c) * taps + w] += sums[w * CHANNELS + c];
            if (to.bias) to.bias[first + c] += sums[taps * CHANNELS + c];
        }
    });
}

}  // namespace

// pieces as of engine_delta_forward; weight [channels, taps], bias may be null; tail [received, taps - 1, channels].
EXPORT void engine_conv_forward(int threads, int type, int64_t num, const int64_t* pieces, int64_t channels,
                                int64_t taps, int silu, const void* x, int64_t ld_x, const float* weight,
                                const float* bias, const void* tail, void* y) {
    simd::with_type(type, [=](auto zero) {
        using T = decltype(zero);
        forward(threads, read_pieces(num, pieces), {channels, taps, silu != 0}, (const T*)x, ld_x, weight, bias,
                (const T*)tail, (T*)y);
    });
}
REPLAYED(engine_conv_forward)

// Adds to the fp32 gradients of weight and bias, which may be null.
EXPORT void engine_conv_backward(int threads, int type, int64_t num, const int64_t* pieces, int64_t channels,
                                 int64_t taps, int silu, const void* dy, int64_t ld_dy, const void* x, int64_t ld_x,
                                 const float* weight, const float* bias, const void* tail, void* dx, void* d_tail,
                                 float* weight_gradient, float* bias_gradient) {
    simd::with_type(type, [=](auto zero) {
        using T = decltype(zero);
        backward<T>(threads, read_pieces(num, pieces), {channels, taps, silu != 0}, (const T*)dy, ld_dy, (const T*)x,
                    ld_x, weight, bias, (const T*)tail, {(T*)dx, (T*)d_tail, weight_gradient, bias_gradient});
    });
}
