// What forward and backward do with a chunk of a recurrence (recurrence.h): its keys, factors and pairs, the solution u,
// and the state that it leaves.
#pragma once

#include <cmath>

#include "recurrence.h"
#include "simd.h"

namespace recurrence {

using blocks::Arena;
using simd::Float;
using simd::LANES;

// Kinds: DELTA or a state space, whose states lie as [V, K]; CHANNEL: a decay for each of K.
template <class T, bool DELTA, bool CHANNEL>
class Chunks {
  protected:
    Chunks(const Shape& shape, const Inputs<T>& inputs) : s_(shape), in_(inputs) {}

    template <class Work>
    void each(int threads, const std::vector<Piece>& pieces, const Work& work) const {
        const std::vector<int64_t> order = by_length(pieces);
        const int64_t per_group = s_.per_group(), blocks = s_.blocks();
        common::parallel_for(threads, (int64_t)pieces.size() * s_.groups * blocks, [&](int64_t item) {
            const int64_t group = item / blocks % s_.groups, begin = item % blocks * HEADS;
            work(order[item / (s_.groups * blocks)], group, group * per_group + begin,
                 group * per_group + std::min(begin + HEADS, per_group));
        });
    }

    // Queries and keys of a chunk as the equations have them, their norms' factors, and the products of all pairs.
    struct Keys {
        float *q, *k, *q_norm, *k_norm, *qk, *kk;
        static int64_t floats(const Shape& s) { return 2 * CHUNK * s.ld_key() + 2 * 64 + 2 * CHUNK * LD; }
        Keys(const Shape& s, Arena& arena)
            : q(arena.take(CHUNK * s.ld_key())), k(arena.take(CHUNK * s.ld_key())), q_norm(arena.take(64)),
              k_norm(arena.take(64)), qk(arena.take(CHUNK * LD)), kk(arena.take(CHUNK * LD)) {}
    };

    // exp(c), exp(c_last - c) and exp(c_last): [CHUNK] and a number, or [CHUNK, ld_key] and [K].
    struct Factors {
        float *total, *below;  // c, and what rounding took from it; with channels decay itself, and a row for sums
        float *grow, *shrink, *last, *beta;
        static int64_t floats(const Shape& s) { return 3 * rows(s) + 2 * Arena::size(s.ld_key()) + 2 * 64; }
        static int64_t rows(const Shape& s) { return CHANNEL ? CHUNK * s.ld_key() : 64; }
        Factors(const Shape& s, Arena& arena)
            : total(arena.take(rows(s))), below(arena.take(std::max<int64_t>(64, s.ld_key()))),
              grow(arena.take(rows(s))), shrink(arena.take(rows(s))), last(arena.take(s.ld_key())),
              beta(arena.take(64)) {}
    };

    // With channels, pairs of a part of a chunk with the tokens before it are products of rows: with c_0 that of the
    // part's first token, q and k times near = exp(c_i - c_0), and k times far = exp(c_0 - c_j).
    struct Parts {
        float *near, *far, *q, *k, *before, *transposed, *d_near, *d_before;
        static int64_t floats(const Shape& s) {
            return CHANNEL ? (4 * PART + 3 * CHUNK) * s.ld_key() + tiles::padded(s.key) * LD : 0;
        }
        Parts(const Shape& s, Arena& arena) {
            if (!CHANNEL) return;
            for (float** one : {&near, &q, &k, &d_near}) *one = arena.take(PART * s.ld_key());
            for (float** one : {&far, &before, &d_before}) *one = arena.take(CHUNK * s.ld_key());
            transposed = arena.take(tiles::padded(s.key) * LD);
        }
    };

    SIMD_INLINE Float factor(const float* factors, int64_t row, int64_t d) const {
        return CHANNEL ? simd::load(factors + row * s_.ld_key() + d) : simd::splat(factors[row]);
    }

    SIMD_INLINE Float last_factor(const float* last, int64_t d) const { return simd::splat(last[CHANNEL ? d : 0]); }

    float read_row(const T* from, float scale, float* to) const {
        float squares = 0.0f;
        simd::widen_rows(from, 0, 1, s_.key, to, 0);
        std::fill(to + s_.key, to + s_.ld_key(), 0.0f);
        if (!DELTA) return 1.0f;
        squares = blocks::dot(to, to, s_.key);
        const float norm = 1.0f / std::sqrt(squares + NORM_EPS);
        for (int64_t d = 0; d < s_.key; d += LANES) simd::store(to + d, simd::load(to + d) * (norm * scale));
        return norm;
    }

    void read_keys(int64_t token, int64_t group, int64_t rows, const Keys& keys, float* transposed) const {
        const int64_t ld = s_.ld_key();
        for (int64_t i = 0; i < rows; ++i) {
            keys.q_norm[i] = read_row(in_.q.at(token + i, group), s_.scale, keys.q + i * ld);
            keys.k_norm[i] = read_row(in_.k.at(token + i, group), 1.0f, keys.k + i * ld);
        }
        if (CHANNEL) return;
        blocks::transpose(keys.k, ld, rows, s_.key, transposed, LD);
        blocks::lower_of_product(rows, s_.key, keys.q, ld, transposed, LD, keys.qk, LD);
        if (DELTA) blocks::lower_of_product(rows, s_.key, keys.k, ld, transposed, LD, keys.kk, LD);
    }

    void read_factors(int64_t token, int64_t head, int64_t rows, const Factors& f) const {
        const int64_t ld = s_.ld_key();
        for (int64_t i = 0; i < rows; ++i) f.beta[i] = in_.beta[(token + i) * s_.heads + head];
        if constexpr (CHANNEL) {
            for (int64_t i = 0; i < rows; ++i) {
                const float* decay = in_.decay + ((token + i) * s_.heads + head) * s_.key;
                std::fill(f.total + i * ld + s_.key, f.total + (i + 1) * ld, 0.0f);
                std::copy(decay, decay + s_.key, f.total + i * ld);
            }
            // sums from either end, not their differences: neighbours' are small where sums are large
            for (int64_t d = 0; d < s_.key; d += LANES) {
                Float sum = {};
                for (int64_t i = 0; i < rows; ++i) {
                    sum += simd::load(f.total + i * ld + d);
                    simd::store(f.grow + i * ld + d, simd::exp(sum));
                }
                simd::store(f.last + d, simd::exp(sum));
                sum = Float{};
                for (int64_t i = rows - 1; i >= 0; --i) {
                    simd::store(f.shrink + i * ld + d, simd::exp(sum));
                    sum += simd::load(f.total + i * ld + d);
                }
            }
        } else {
            double sum = 0.0;  // differences of neighbours are small where sums are large
            for (int64_t i = 0; i < 64; ++i) {
                if (i < rows) sum += DELTA ? in_.decay[(token + i) * s_.heads + head] : f.beta[i] * in_.rate[head];
                f.total[i] = (float)sum;
                f.below[i] = (float)(sum - f.total[i]);
            }
            for (int64_t i = 0; i < rows; i += LANES) {
                simd::store(f.grow + i, simd::exp(simd::load(f.total + i)));
                simd::store(f.shrink + i, simd::exp(difference(f, rows - 1, i)));
            }
            f.last[0] = f.grow[rows - 1];
        }
    }

    void scale_rows(const float* from, const float* factors, int64_t rows, float* to) const {
        const int64_t ld = s_.ld_key();
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t d = 0; d < s_.key; d += LANES)
                simd::store(to + i * ld + d, simd::load(from + i * ld + d) * factor(factors, i, d));
    }

    // exp(c_i - c_j) for the columns from j on; 0 where j > i, or j = i if `strictly`.
    SIMD_INLINE Float apart(const Factors& f, int64_t i, int64_t j, bool strictly) const {
        const Float value = difference(f, i, j);
        return lower(simd::exp(value > 0.0f ? Float{} : value), i, j, strictly);
    }

    // c_i - c_j
    static SIMD_INLINE Float difference(const Factors& f, int64_t i, int64_t j) {
        return (f.total[i] - simd::load(f.total + j)) + (f.below[i] - simd::load(f.below + j));
    }

    static SIMD_INLINE Float lower(Float value, int64_t i, int64_t j, bool strictly) {
        simd::Int column;
        for (int lane = 0; lane < LANES; ++lane) column[lane] = lane;
        return column < (int)(i - j + (strictly ? 0 : 1)) ? value : Float{};
    }

    // P, and -A: the right sides of the equations above. Either may be null.
    void pairs(const Keys& keys, const Factors& f, const Parts& parts, int64_t rows, float* p, float* neg) const {
        if constexpr (CHANNEL) {
            channel_pairs(keys, f, parts, rows, p, neg);
        } else {
            for (int64_t i = 0; i < rows; ++i)
                for (int64_t j = 0; j < rows; j += LANES) {
                    const bool below = j <= i;
                    const Float e = below ? apart(f, i, j, false) : Float{};
                    const int64_t at = i * LD + j;
                    if (p) simd::store(p + at, below ? lower(e * simd::load(keys.qk + at), i, j, false) : Float{});
                    if (DELTA && neg)
                        simd::store(neg + at, below ? lower(e * simd::load(keys.kk + at) * -f.beta[i], i, j, true)
                                                    : Float{});
                }
        }
    }

    void channel_pairs(const Keys& keys, const Factors& f, const Parts& parts, int64_t rows, float* p, float* neg) const {
        const int64_t ld = s_.ld_key();
        for (float* pairs : {p, neg})
            if (pairs) std::fill(pairs, pairs + rows * LD, 0.0f);
        for (int64_t first = 0; first < rows; first += PART) {
            const int64_t count = std::min(PART, rows - first);
            if (first > 0) {
                read_part(keys, f, first, count, parts);
                blocks::transpose(parts.before, ld, first, s_.key, parts.transposed, LD);
                const int64_t columns = tiles::padded(first), at = first * LD;
                if (p) blocks::product<false>(count, columns, s_.key, {parts.q, ld, 1}, parts.transposed, LD, p + at, LD);
                if (neg) {
                    blocks::product<false>(count, columns, s_.key, {parts.k, ld, 1}, parts.transposed, LD, neg + at, LD);
                    for (int64_t i = first; i < first + count; ++i)
                        for (int64_t j = 0; j < columns; ++j) neg[i * LD + j] *= -f.beta[i];
                }
            }
            each_pair(f, first, count, [&](int64_t i, int64_t j, const auto& apart) {
                Float with_q = {}, with_k = {};
                for (int64_t d = 0; d < s_.key; d += LANES) {
                    const Float right = apart(d) * simd::load(keys.k + j * ld + d);
                    with_q += right * simd::load(keys.q + i * ld + d);
                    with_k += right * simd::load(keys.k + i * ld + d);
                }
                if (p) p[i * LD + j] = simd::sum(with_q);
                if (neg) neg[i * LD + j] = i == j ? 0.0f : simd::sum(with_k) * -f.beta[i];
            });
        }
    }

    // Rows of the part that begins at `first`, and k of those before it.
    void read_part(const Keys& keys, const Factors& f, int64_t first, int64_t count, const Parts& parts) const {
        const int64_t ld = s_.ld_key();
        for (int64_t d = 0; d < s_.key; d += LANES) {
            Float sum = {};
            for (int64_t i = 0; i < count; ++i) {
                const int64_t at = i * ld + d, from = (first + i) * ld + d;
                if (i > 0) sum += simd::load(f.total + from);
                const Float near = simd::exp(sum);
                simd::store(parts.near + at, near);
                simd::store(parts.q + at, near * simd::load(keys.q + from));
                simd::store(parts.k + at, near * simd::load(keys.k + from));
            }
            sum = Float{};
            for (int64_t j = first - 1; j >= 0; --j) {
                sum += simd::load(f.total + (j + 1) * ld + d);
                const Float far = simd::exp(sum);
                simd::store(parts.far + j * ld + d, far);
                simd::store(parts.before + j * ld + d, far * simd::load(keys.k + j * ld + d));
            }
        }
    }

    // Calls work(i, j, apart) for j <= i in a part; apart(d) is exp(c_i - c_j) and is to be called once for each d.
    template <class Work>
    void each_pair(const Factors& f, int64_t first, int64_t count, const Work& work) const {
        const int64_t ld = s_.ld_key();
        for (int64_t j = first; j < first + count; ++j) {
            std::fill(f.below, f.below + ld, 0.0f);
            for (int64_t i = j; i < first + count; ++i)
                work(i, j, [&](int64_t d) {
                    if (i == j) return simd::splat(1.0f);
                    const Float sum = simd::load(f.below + d) + simd::load(f.total + i * ld + d);
                    simd::store(f.below + d, sum);
                    return simd::exp(sum);
                });
        }
    }

    // u of a chunk, and -A where it is solved with.
    void solve(int64_t token, int64_t head, int64_t rows, const Keys& keys, const Factors& f, const float* state,
               float* ks, float* neg, float* u) const {
        const int64_t ld = s_.ld_value();
        if (DELTA && state) {
            scale_rows(keys.k, f.grow, rows, ks);
            blocks::product<false>(rows, s_.value, s_.key, {ks, s_.ld_key(), 1}, state, ld, u, ld);
        }
        for (int64_t i = 0; i < rows; ++i) {
            const T* v = in_.v.at(token + i, head);
            const float beta = f.beta[i];
            simd::for_each(s_.value, [&](auto, int64_t d, int64_t count) {
                Float value = simd::load_up_to(v + d, count);
                if (DELTA && state) value -= simd::load_up_to(u + i * ld + d, count);
                simd::store_up_to(u + i * ld + d, value * beta, count);
            });
        }
        if (!DELTA) return;
        blocks::solve(rows, s_.value, neg, LD, u, ld);
    }

    // state = exp(c_last) state + kd^T u; `fresh`: the state was 0.
    void advance(int64_t rows, const Keys& keys, const Factors& f, const float* u, bool fresh, float* kd,
                 const float* before, float* state) const {
        const int64_t ld = s_.ld_value();
        scale_rows(keys.k, f.shrink, rows, kd);
        if (fresh) {
            blocks::product<false>(s_.key, s_.value, rows, {kd, 1, s_.ld_key()}, u, ld, state, ld);
            return;
        }
        for (int64_t d = 0; d < s_.key; ++d)
            for (int64_t e = 0; e < s_.value; e += LANES)
                simd::store(state + d * ld + e, simd::load(before + d * ld + e) * last_factor(f.last, d));
        blocks::product<true>(s_.key, s_.value, rows, {kd, 1, s_.ld_key()}, u, ld, state, ld);
    }

    // A state where the caller has it: [K, V] of the delta rule, [V, K] of a state space.
    void read_state(const float* from, float* state) const {
        const int64_t ld = s_.ld_value();
        for (int64_t d = 0; d < s_.key; ++d)
            for (int64_t e = 0; e < s_.value; ++e)
                state[d * ld + e] = from[DELTA ? d * s_.value + e : e * s_.key + d];
    }

    void write_state(const float* state, float* to) const {
        const int64_t ld = s_.ld_value();
        if (DELTA) {
            copy_state(state, ld, to, s_.value);
            return;
        }
        for (int64_t e = 0; e < s_.value; ++e)
            for (int64_t d = 0; d < s_.key; ++d) to[e * s_.key + d] = state[d * ld + e];
    }

    void copy_state(const float* from, int64_t ld_from, float* to, int64_t ld_to) const {
        for (int64_t d = 0; d < s_.key; ++d) std::copy(from + d * ld_from, from + d * ld_from + s_.value, to + d * ld_to);
    }

    const float* state_at(const float* states, int64_t index, int64_t head) const {
        return states + (index * s_.heads + head) * s_.state();
    }
    float* state_at(float* states, int64_t index, int64_t head) const {
        return states + (index * s_.heads + head) * s_.state();
    }

    Shape s_;
    Inputs<T> in_;
};

}  // namespace recurrence
