// A linear recurrence of a state S [K, V] along pieces of a row, in chunks:
//
//     S_t = D_t S_{t-1} + k_t u_t^T        out_t = S_t^T q_t        D_t = exp(decay_t), a number or one for each of K
//
// where u is beta (v - k_t^T D_t S_{t-1}) in the gated delta rule (arXiv 2412.06464, per channel 2510.26692) and dt x in
// a state space (Mamba2, arXiv 2405.21060). With c the running sum of decay inside a chunk, S its first state:
//
//     qs = q exp(c)   ks = k exp(c)   kd = k exp(c_last - c)   P_ij = q_i (exp(c_i - c_j) k_j), A_ij likewise of beta k
//     (I + A) u = beta (v - ks S)      out = qs S + P u      S' = exp(c_last) S + kd^T u
//
// An item of work is a piece and a key head, with all value heads that read it or eight of them, from the piece's first
// token to its last: states stay in the second cache. Forward keeps the states between segments of SEGMENT chunks;
// backward computes a segment's states again, then its chunks from the last one on.
//
// The gradient of c needs no products of its own: q dq + k dk, with a minus where k's factor has -c.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "blocks.h"
#include "common.h"
#include "heads.h"
#include "simd.h"

namespace recurrence {

using blocks::Arena;
using heads::Heads;
using simd::Float;
using simd::LANES;

constexpr int64_t CHUNK = 60;     // tokens; ten tiles' rows
constexpr int64_t SEGMENT = 4;    // chunks
constexpr int64_t HEADS = 8;      // value heads of an item
constexpr int64_t PART = 12;      // tokens of a chunk whose pairs are made channel by channel
constexpr int64_t LD = 80;        // between rows of [CHUNK, CHUNK]
constexpr float NORM_EPS = 1e-6f;

struct Shape {
    int64_t tokens, groups, heads, key, value;
    float scale;
    int64_t per_group() const { return heads / groups; }
    int64_t blocks() const { return common::ceil_div(per_group(), HEADS); }
    int64_t ld_key() const { return blocks::row_length(key); }
    int64_t ld_value() const { return blocks::row_length(value); }
    int64_t state() const { return key * value; }
};

// Indices of states: received, sent, and the first of those kept between segments; -1 for none.
struct Piece {
    int64_t first, length, initial, final, kept;
};

inline std::vector<Piece> read_pieces(int64_t count, const int64_t* values) {
    std::vector<Piece> pieces;
    for (const int64_t* v = values; v < values + 5 * count; v += 5) pieces.push_back({v[0], v[1], v[2], v[3], v[4]});
    return pieces;
}

// The longest first, so that no thread begins one when the others are done.
inline std::vector<int64_t> by_length(const std::vector<Piece>& pieces) {
    std::vector<int64_t> order(pieces.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return pieces[a].length > pieces[b].length; });
    return order;
}

template <class T>
struct Inputs {
    Heads<const T> q, k, v;      // c, b and x of a state space
    const float *decay, *beta;   // [T, N] or [T, N, K]; [T, N], the dt of a state space
    const float *rate, *skip;    // of a state space, [N]: decay = dt rate; out += skip x, may be null
};

template <class T>
struct Gradients {
    Heads<T> dq, dk, dv;
    float *ddecay, *dbeta;             // as decay and beta
    float *drate, *dskip;              // [pieces, N], summed by the caller
    const float* d_final;              // may be null
    float* d_initial;                  // may be null
};

// Kinds: DELTA or a state space, whose states lie as [V, K]; CHANNEL: a decay for each of K.
template <class T, bool DELTA, bool CHANNEL>
class Recurrence {
  public:
    Recurrence(const Shape& shape, const Inputs<T>& inputs) : s_(shape), in_(inputs) {}

    void forward(int threads, const std::vector<Piece>& pieces, const float* initial, const Heads<T>& out, float* final,
                 float* kept) const {
        each(threads, pieces, [&](int64_t index, int64_t group, int64_t first_head, int64_t end_head) {
            const Piece& piece = pieces[index];
            if (piece.length == 1) step(piece, group, first_head, end_head, initial, out, final);
            else forward_piece(piece, group, first_head, end_head, initial, out, final, kept);
        });
    }

    void backward(int threads, const std::vector<Piece>& pieces, const float* initial, const float* kept,
                  const Heads<const T>& d_out, const Gradients<T>& to) const {
        const int64_t size = s_.tokens * s_.groups * s_.key, count = s_.blocks();
        if (count == 1) {
            each(threads, pieces, [&](int64_t index, int64_t group, int64_t first_head, int64_t end_head) {
                backward_piece(index, pieces[index], group, first_head, end_head, initial, kept, d_out, to, to.dq, to.dk);
            });
            return;
        }
        const std::unique_ptr<float[]> parts(new float[(size_t)(2 * count * size)]);
        each(threads, pieces, [&](int64_t index, int64_t group, int64_t first_head, int64_t end_head) {
            float* part = parts.get() + 2 * (first_head % s_.per_group() / HEADS) * size;
            const Heads<float> dq = {part, s_.groups * s_.key, s_.key}, dk = {part + size, s_.groups * s_.key, s_.key};
            backward_piece(index, pieces[index], group, first_head, end_head, initial, kept, d_out, to, dq, dk);
        });
        common::parallel_for(threads, s_.tokens, [&](int64_t token) {
            for (int64_t group = 0; group < s_.groups; ++group) {
                const int64_t at = (token * s_.groups + group) * s_.key;
                sum_parts(parts.get() + at, 2 * size, count, to.dq.at(token, group));
                sum_parts(parts.get() + size + at, 2 * size, count, to.dk.at(token, group));
            }
        });
    }

  private:
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

    void sum_parts(const float* part, int64_t distance, int64_t count, T* to) const {
        simd::for_each(s_.key, [=](auto, int64_t d, int64_t lanes) {
            Float sum = {};
            for (int64_t i = 0; i < count; ++i) sum += simd::load_up_to(part + i * distance + d, lanes);
            simd::store_up_to(to + d, sum, lanes);
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

    void forward_piece(const Piece& piece, int64_t group, int64_t first_head, int64_t end_head, const float* initial,
                       const Heads<T>& out, float* final, float* kept) const {
        const int64_t ld = s_.ld_value(), size = s_.key * ld, count = end_head - first_head, ld_key = s_.ld_key();
        Arena arena(common::scratch(Keys::floats(s_) + Factors::floats(s_) + count * Arena::size(size) +
                                    Parts::floats(s_) + tiles::padded(s_.key) * LD + 2 * CHUNK * LD + CHUNK * ld_key +
                                    2 * CHUNK * ld));
        const Keys keys(s_, arena);
        const Factors f(s_, arena);
        const Parts parts(s_, arena);
        float* states = arena.take(count * Arena::size(size));
        float *transposed = arena.take(tiles::padded(s_.key) * LD), *p = arena.take(CHUNK * LD);
        float *neg = arena.take(CHUNK * LD), *scaled = arena.take(CHUNK * ld_key);
        float *u = arena.take(CHUNK * ld), *sums = arena.take(CHUNK * ld);
        bool fresh = piece.initial < 0;
        for (int64_t h = 0; h < count && !fresh; ++h)
            read_state(state_at(initial, piece.initial, first_head + h), states + h * size);
        for (int64_t place = 0; place < piece.length; place += CHUNK) {
            const int64_t rows = std::min(CHUNK, piece.length - place), token = piece.first + place;
            const bool last = place + rows == piece.length;
            read_keys(token, group, rows, keys, transposed);
            for (int64_t head = first_head; head < end_head; ++head) {
                float* state = states + (head - first_head) * size;
                if (kept && place > 0 && place % (CHUNK * SEGMENT) == 0)
                    copy_state(state, ld, state_at(kept, piece.kept + place / (CHUNK * SEGMENT) - 1, head), s_.value);
                read_factors(token, head, rows, f);
                pairs(keys, f, parts, rows, p, neg);
                solve(token, head, rows, keys, f, fresh ? nullptr : state, scaled, neg, u);
                if (fresh) {
                    blocks::product_lower<false>(rows, s_.value, p, LD, u, ld, sums, ld);
                } else {
                    scale_rows(keys.q, f.grow, rows, scaled);
                    blocks::product<false>(rows, s_.value, s_.key, {scaled, ld_key, 1}, state, ld, sums, ld);
                    blocks::product_lower<true>(rows, s_.value, p, LD, u, ld, sums, ld);
                }
                write_out(token, head, rows, sums, out);
                if (!last || piece.final >= 0) advance(rows, keys, f, u, fresh, scaled, state, state);
                if (last && piece.final >= 0) write_state(state, state_at(final, piece.final, head));
            }
            fresh = false;
        }
    }

    void write_out(int64_t token, int64_t head, int64_t rows, const float* sums, const Heads<T>& out) const {
        const float skip = !DELTA && in_.skip ? in_.skip[head] : 0.0f;
        for (int64_t i = 0; i < rows; ++i) {
            T* to = out.at(token + i, head);
            const T* v = in_.v.at(token + i, head);
            const float* from = sums + i * s_.ld_value();
            simd::for_each(s_.value, [=](auto, int64_t d, int64_t count) {
                Float value = simd::load_up_to(from + d, count);
                if (!DELTA) value += skip * simd::load_up_to(v + d, count);
                simd::store_up_to(to + d, value, count);
            });
        }
    }

    // One token from a state to the next, which may be the same memory.
    void step(const Piece& piece, int64_t group, int64_t first_head, int64_t end_head, const float* initial,
              const Heads<T>& out, float* final) const {
        const int64_t token = piece.first, ld_key = s_.ld_key();
        Arena arena(common::scratch(2 * Arena::size(ld_key) + Factors::floats(s_) + 2 * Arena::size(s_.ld_value())));
        float *q = arena.take(ld_key), *k = arena.take(ld_key), *sums = arena.take(s_.ld_value());
        float* u = arena.take(s_.ld_value());
        const Factors f(s_, arena);
        read_row(in_.q.at(token, group), s_.scale, q);
        read_row(in_.k.at(token, group), 1.0f, k);
        const float qk = blocks::dot(q, k, s_.key);
        for (int64_t head = first_head; head < end_head; ++head) {
            const float* before = piece.initial < 0 ? nullptr : state_at(initial, piece.initial, head);
            float* after = piece.final < 0 ? nullptr : state_at(final, piece.final, head);
            read_factors(token, head, 1, f);
            simd::widen_rows(in_.v.at(token, head), 0, 1, s_.value, u, 0);
            if (DELTA) step_delta(q, k, qk, f, before, after, u, sums);
            else step_space(q, k, f, before, after, u, sums);
            write_out(token, head, 1, sums, out);
        }
    }

    void step_delta(const float* q, const float* k, float qk, const Factors& f, const float* before, float* after,
                    const float* v, float* out) const {
        const auto decay = [&](int64_t d) { return f.grow[CHANNEL ? d : 0]; };
        simd::for_each(s_.value, [&](auto, int64_t e, int64_t count) {
            Float read[2] = {}, sum[2] = {};
            for (int64_t d = 0; before && d < s_.key; ++d) {
                const Float row = simd::load_up_to(before + d * s_.value + e, count) * decay(d);
                read[d & 1] += row * k[d];
                sum[d & 1] += row * q[d];
            }
            const Float u = (simd::load_up_to(v + e, count) - (read[0] + read[1])) * f.beta[0];
            simd::store_up_to(out + e, sum[0] + sum[1] + u * qk, count);
            for (int64_t d = 0; after && d < s_.key; ++d) {
                Float row = u * k[d];
                if (before) row += simd::load_up_to(before + d * s_.value + e, count) * decay(d);
                simd::store_up_to(after + d * s_.value + e, row, count);
            }
        });
    }

    void step_space(const float* q, const float* k, const Factors& f, const float* before, float* after, const float* v,
                    float* out) const {
        for (int64_t e = 0; e < s_.value; ++e) {
            const float u = v[e] * f.beta[0];
            Float sum = {};
            for (int64_t d = 0; d < s_.key; d += LANES) {
                const int64_t count = std::min<int64_t>(LANES, s_.key - d);
                Float row = simd::load_up_to(k + d, count) * u;
                if (before) row += simd::load_up_to(before + e * s_.key + d, count) * f.grow[0];
                if (after) simd::store_up_to(after + e * s_.key + d, row, count);
                sum += row * simd::load_up_to(q + d, count);
            }
            out[e] = simd::sum(sum);
        }
    }

    // What backward has of a chunk of its segment: of all heads, and of the present one.
    struct Saved {
        Keys keys;
        float *neg, *u, *state, *dq, *dk;
        static int64_t floats(const Shape& s) {
            return Keys::floats(s) + CHUNK * LD + CHUNK * s.ld_value() + s.key * s.ld_value() + 2 * CHUNK * s.ld_key();
        }
        Saved(const Shape& s, Arena& arena)
            : keys(s, arena), neg(arena.take(CHUNK * LD)), u(arena.take(CHUNK * s.ld_value())),
              state(arena.take(s.key * s.ld_value())), dq(arena.take(CHUNK * s.ld_key())),
              dk(arena.take(CHUNK * s.ld_key())) {}
    };

    struct Work {
        Factors f;
        Parts parts;
        float *transposed, *turned, *p, *dp, *da, *scaled, *dscaled, *dq, *plus, *minus, *d_out, *du, *dc;
        static int64_t floats(const Shape& s) {
            const int64_t key = CHUNK * s.ld_key(), value = CHUNK * s.ld_value();
            return Factors::floats(s) + Parts::floats(s) + tiles::padded(std::max(s.key, s.value)) * LD +
                   tiles::padded(s.value) * s.ld_key() + 3 * CHUNK * LD + 5 * key + 2 * value + s.ld_key();
        }
        Work(const Shape& s, Arena& arena)
            : f(s, arena), parts(s, arena), transposed(arena.take(tiles::padded(std::max(s.key, s.value)) * LD)),
              turned(arena.take(tiles::padded(s.value) * s.ld_key())), p(arena.take(CHUNK * LD)),
              dp(arena.take(CHUNK * LD)), da(arena.take(CHUNK * LD)), scaled(arena.take(CHUNK * s.ld_key())),
              dscaled(arena.take(CHUNK * s.ld_key())), dq(arena.take(CHUNK * s.ld_key())),
              plus(arena.take(CHUNK * s.ld_key())), minus(arena.take(CHUNK * s.ld_key())),
              d_out(arena.take(CHUNK * s.ld_value())), du(arena.take(CHUNK * s.ld_value())),
              dc(arena.take(s.ld_key())) {}
    };

    template <class D>
    void backward_piece(int64_t index, const Piece& piece, int64_t group, int64_t first_head, int64_t end_head,
                        const float* initial, const float* kept, const Heads<const T>& d_out, const Gradients<T>& to,
                        const Heads<D>& to_dq, const Heads<D>& to_dk) const {
        const int64_t ld = s_.ld_value(), size = s_.key * ld, count = end_head - first_head;
        const int64_t span = CHUNK * SEGMENT, segments = common::ceil_div(piece.length, span);
        Arena arena(common::scratch(SEGMENT * Saved::floats(s_) + Work::floats(s_) + count * Arena::size(size)));
        std::vector<Saved> saved;
        for (int64_t i = 0; i < std::min(SEGMENT, common::ceil_div(piece.length, CHUNK)); ++i) saved.emplace_back(s_, arena);
        const Work work(s_, arena);
        float* d_states = arena.take(count * Arena::size(size));
        const bool given = piece.final >= 0 && to.d_final;
        for (int64_t h = 0; h < count; ++h) {
            if (given) read_state(state_at(to.d_final, piece.final, first_head + h), d_states + h * size);
            if (!DELTA) to.drate[index * s_.heads + first_head + h] = to.dskip[index * s_.heads + first_head + h] = 0.0f;
        }
        for (int64_t segment = segments - 1; segment >= 0; --segment) {
            const int64_t begin = segment * span, length = std::min(span, piece.length - begin);
            const int64_t chunks = common::ceil_div(length, CHUNK);
            const auto token = [&](int64_t c) { return piece.first + begin + c * CHUNK; };
            const auto rows = [&](int64_t c) { return std::min(CHUNK, length - c * CHUNK); };
            for (int64_t c = 0; c < chunks; ++c) {
                read_keys(token(c), group, rows(c), saved[c].keys, work.transposed);
                std::fill(saved[c].dq, saved[c].dq + CHUNK * s_.ld_key(), 0.0f);
                std::fill(saved[c].dk, saved[c].dk + CHUNK * s_.ld_key(), 0.0f);
            }
            const bool fresh = segment == 0 && piece.initial < 0;
            for (int64_t head = first_head; head < end_head; ++head) {
                if (segment > 0)
                    copy_state(state_at(kept, piece.kept + segment - 1, head), s_.value, saved[0].state, ld);
                else if (!fresh) read_state(state_at(initial, piece.initial, head), saved[0].state);
                for (int64_t c = 0; c < chunks; ++c) {
                    const Saved& one = saved[c];
                    read_factors(token(c), head, rows(c), work.f);
                    pairs(one.keys, work.f, work.parts, rows(c), nullptr, one.neg);
                    solve(token(c), head, rows(c), one.keys, work.f, fresh && c == 0 ? nullptr : one.state, work.scaled,
                          one.neg, one.u);
                    if (c + 1 < chunks)
                        advance(rows(c), one.keys, work.f, one.u, fresh && c == 0, work.scaled, one.state,
                                saved[c + 1].state);
                }
                float* d_state = d_states + (head - first_head) * size;
                for (int64_t c = chunks - 1; c >= 0; --c) {
                    const bool last = segment == segments - 1 && c == chunks - 1;
                    backward_chunk(index, token(c), head, rows(c), saved[c], work, fresh && c == 0, last && !given,
                                   segment > 0 || c > 0 || piece.initial >= 0, d_out, d_state, to);
                }
                if (segment == 0 && piece.initial >= 0) write_state(d_state, state_at(to.d_initial, piece.initial, head));
            }
            for (int64_t c = 0; c < chunks; ++c) {
                const Saved& one = saved[c];
                for (int64_t i = 0; i < rows(c); ++i) {
                    const int64_t at = i * s_.ld_key();
                    write_key(one.keys.q + at, one.dq + at, one.keys.q_norm[i], s_.scale, to_dq.at(token(c) + i, group));
                    write_key(one.keys.k + at, one.dk + at, one.keys.k_norm[i], 1.0f, to_dk.at(token(c) + i, group));
                }
            }
        }
    }

    // Of x where y = scale * norm * x: norm (scale dy - y (y dy) / scale).
    template <class D>
    void write_key(const float* y, const float* dy, float norm, float scale, D* to) const {
        const float along = DELTA ? blocks::dot(y, dy, s_.key) / scale : 0.0f;
        simd::for_each(s_.key, [=](auto, int64_t d, int64_t count) {
            Float value = simd::load_up_to(dy + d, count);
            if (DELTA) value = norm * (scale * value - simd::load_up_to(y + d, count) * along);
            simd::store_up_to(to + d, value, count);
        });
    }

    // fresh: the chunk's first state is 0; ended: the gradient of its last one is; wanted: that of the first is asked for.
    void backward_chunk(int64_t index, int64_t token, int64_t head, int64_t rows, const Saved& saved, const Work& w,
                        bool fresh, bool ended, bool wanted, const Heads<const T>& d_out, float* d_state,
                        const Gradients<T>& to) const {
        const int64_t key = s_.key, value = s_.value, ld_key = s_.ld_key(), ld = s_.ld_value();
        const Keys& keys = saved.keys;
        const Factors& f = w.f;
        read_factors(token, head, rows, f);
        pairs(keys, f, w.parts, rows, w.p, nullptr);
        for (int64_t i = 0; i < rows; ++i) simd::widen_rows(d_out.at(token + i, head), 0, 1, value, w.d_out + i * ld, 0);
        float dc_last = 0.0f;  // of c of the last token, beside its own
        std::fill(w.dc, w.dc + ld_key, 0.0f);

        // out = qs S + P u and S' = exp(c_last) S + kd^T u, of u and the keys
        blocks::product_upper<false>(rows, value, w.p, LD, w.d_out, ld, w.du, ld);
        blocks::transpose(saved.u, ld, rows, value, w.transposed, LD);
        blocks::lower_of_product(rows, value, w.d_out, ld, w.transposed, LD, w.dp, LD);
        if (ended) {
            for (int64_t i = 0; i < rows; ++i) std::fill(w.minus + i * ld_key, w.minus + (i + 1) * ld_key, 0.0f);
        } else {
            scale_rows(keys.k, f.shrink, rows, w.scaled);
            blocks::product<true>(rows, value, key, {w.scaled, ld_key, 1}, d_state, ld, w.du, ld);
            blocks::transpose(d_state, ld, key, value, w.turned, ld_key);
            blocks::product<false>(rows, key, value, {saved.u, ld, 1}, w.turned, ld_key, w.minus, ld_key);
            for (int64_t i = 0; i < rows; ++i)
                for (int64_t d = 0; d < key; d += LANES) {
                    float* at = w.minus + i * ld_key + d;
                    const Float d_kd = simd::load(at) * factor(f.shrink, i, d);
                    simd::store(at, d_kd);
                }
            for (int64_t i = 0; i < rows; ++i) dc_last += add_products(keys.k + i * ld_key, w.minus + i * ld_key, w.dc);
            for (int64_t d = 0; !fresh && d < key; ++d) {
                const float along = blocks::dot(saved.state + d * ld, d_state + d * ld, value) * f.last[CHANNEL ? d : 0];
                if (CHANNEL) w.dc[d] += along;
                else dc_last += along;
            }
        }
        if (DELTA) {
            blocks::solve_transposed(rows, value, saved.neg, LD, w.du, ld);
            // dA = -dr u^T
            blocks::lower_of_product(rows, value, w.du, ld, w.transposed, LD, w.da, LD);
        }

        // the state's part of q and k
        if (fresh) {
            for (int64_t i = 0; i < rows; ++i) std::fill(w.dq + i * ld_key, w.dq + (i + 1) * ld_key, 0.0f);
        } else {
            blocks::transpose(saved.state, ld, key, value, w.turned, ld_key);
            blocks::product<false>(rows, key, value, {w.d_out, ld, 1}, w.turned, ld_key, w.dq, ld_key);
            if (DELTA) blocks::product<false>(rows, key, value, {w.du, ld, 1}, w.turned, ld_key, w.dscaled, ld_key);
        }
        for (int64_t i = 0; i < rows; ++i) {
            float dbeta = dot_value(w.du + i * ld, in_.v.at(token + i, head));
            for (int64_t d = 0; d < key; d += LANES) {
                const int64_t at = i * ld_key + d;
                const Float grow = factor(f.grow, i, d);
                simd::store(w.dq + at, simd::load(w.dq + at) * grow);
                const Float read = fresh || !DELTA ? Float{} : simd::load(w.dscaled + at) * grow;
                simd::store(w.plus + at, read * -f.beta[i]);
                if (DELTA) dbeta -= fresh ? 0.0f : simd::sum(read * simd::load(keys.k + at));
            }
            to.dbeta[(token + i) * s_.heads + head] = dbeta;
        }
        pairs_backward(keys, f, rows, w, to.dbeta + token * s_.heads + head);

        // v, and the first state
        write_value(token, head, rows, f, w, index, to);
        if (wanted) {
            if (!ended)
                for (int64_t d = 0; d < key; ++d)
                    for (int64_t e = 0; e < value; e += LANES)
                        simd::store(d_state + d * ld + e, simd::load(d_state + d * ld + e) * last_factor(f.last, d));
            scale_rows(keys.q, f.grow, rows, w.scaled);
            const blocks::Left left = {w.scaled, 1, ld_key};
            if (ended) blocks::product<false>(key, value, rows, left, w.d_out, ld, d_state, ld);
            else blocks::product<true>(key, value, rows, left, w.d_out, ld, d_state, ld);
            if (DELTA) {
                for (int64_t i = 0; i < rows; ++i)
                    for (int64_t d = 0; d < key; d += LANES)
                        simd::store(w.scaled + i * ld_key + d,
                                    simd::load(keys.k + i * ld_key + d) * factor(f.grow, i, d) * -f.beta[i]);
                blocks::product<true>(key, value, rows, left, w.du, ld, d_state, ld);
            }
        }

        // c, from the last token on
        if constexpr (CHANNEL) {
            for (int64_t i = rows - 1; i >= 0; --i) {
                float* ddecay = to.ddecay + ((token + i) * s_.heads + head) * key;
                for (int64_t d = 0; d < key; d += LANES) {
                    const int64_t at = i * ld_key + d;
                    const Float of_k = simd::load(w.plus + at) - simd::load(w.minus + at);
                    const Float sum = simd::load(w.dc + d) + (simd::load(keys.q + at) * simd::load(w.dq + at) +
                                                              simd::load(keys.k + at) * of_k);
                    simd::store(w.dc + d, sum);
                    simd::store_up_to(ddecay + d, sum, key - d);
                }
            }
        } else {
            double sum = dc_last, rate = 0.0;  // of terms that nearly cancel
            for (int64_t i = rows - 1; i >= 0; --i) {
                const float *q = keys.q + i * ld_key, *k = keys.k + i * ld_key, *dq = w.dq + i * ld_key;
                const float *plus = w.plus + i * ld_key, *minus = w.minus + i * ld_key;
                Float sums = {};
                for (int64_t d = 0; d < key; d += LANES)
                    sums += simd::load(q + d) * simd::load(dq + d) +
                            simd::load(k + d) * (simd::load(plus + d) - simd::load(minus + d));
                sum += simd::sum(sums);
                const int64_t at = (token + i) * s_.heads + head;
                if (DELTA) {
                    to.ddecay[at] = (float)sum;
                } else {
                    to.dbeta[at] += (float)sum * in_.rate[head];
                    rate += sum * f.beta[i];
                }
            }
            if (!DELTA) to.drate[index * s_.heads + head] += (float)rate;
        }
        for (int64_t i = 0; i < rows * ld_key; i += LANES) {
            simd::store(saved.dq + i, simd::load(saved.dq + i) + simd::load(w.dq + i));
            simd::store(saved.dk + i, simd::load(saved.dk + i) + (simd::load(w.plus + i) + simd::load(w.minus + i)));
        }
    }

    // The sum of x y; for each channel added to `channels` where they are asked for.
    float add_products(const float* x, const float* y, float* channels) const {
        Float sum = {};
        for (int64_t d = 0; d < s_.key; d += LANES) {
            const Float product = simd::load(x + d) * simd::load(y + d);
            sum += product;
            if (CHANNEL) simd::store(channels + d, simd::load(channels + d) + product);
        }
        return CHANNEL ? 0.0f : simd::sum(sum);
    }

    float dot_value(const float* a, const T* b) const {
        Float sums[4] = {};
        simd::for_each(s_.value, [&](auto which, int64_t offset, int64_t count) {
            sums[which] += simd::load_up_to(a + offset, count) * simd::load_up_to(b + offset, count);
        });
        return simd::sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    }

    // From dP and dr u^T: adds to dq, plus (k of a row of A), minus (k of a column), and the beta of A's rows.
    void pairs_backward(const Keys& keys, const Factors& f, int64_t rows, const Work& w, float* dbeta) const {
        const int64_t key = s_.key, ld = s_.ld_key();
        if constexpr (!CHANNEL) {
            for (int64_t i = 0; i < rows; ++i)
                for (int64_t j = 0; j < rows; j += LANES) {
                    const int64_t at = i * LD + j;
                    const Float e = j <= i ? apart(f, i, j, false) : Float{};
                    simd::store(w.dp + at, j <= i ? lower(simd::load(w.dp + at) * e, i, j, false) : Float{});
                    if (DELTA) simd::store(w.da + at, j <= i ? lower(simd::load(w.da + at) * -e, i, j, true) : Float{});
                }
            blocks::product_lower<true>(rows, key, w.dp, LD, keys.k, ld, w.dq, ld);
            blocks::product_upper<true>(rows, key, w.dp, LD, keys.q, ld, w.minus, ld);
            if (!DELTA) return;
            blocks::product_lower<false>(rows, key, w.da, LD, keys.k, ld, w.dscaled, ld);
            for (int64_t i = 0; i < rows; ++i) {
                for (int64_t j = 0; j < rows; j += LANES)
                    simd::store(w.da + i * LD + j, simd::load(w.da + i * LD + j) * f.beta[i]);
                finish_row(keys, f, i, w, dbeta);
            }
            blocks::product_upper<true>(rows, key, w.da, LD, keys.k, ld, w.minus, ld);
        } else {
            channel_pairs_backward(keys, f, rows, w);
            for (int64_t i = 0; i < rows; ++i) finish_row(keys, f, i, w, dbeta);
        }
    }

    void channel_pairs_backward(const Keys& keys, const Factors& f, int64_t rows, const Work& w) const {
        const int64_t key = s_.key, ld = s_.ld_key();
        const Parts& parts = w.parts;
        const auto add = [](float* to, Float value) { simd::store(to, simd::load(to) + value); };
        for (int64_t i = 0; i < rows; ++i) {
            std::fill(w.dscaled + i * ld, w.dscaled + (i + 1) * ld, 0.0f);
            for (int64_t j = 0; j <= i; ++j) w.da[i * LD + j] *= -1.0f;
        }
        for (int64_t first = 0; first < rows; first += PART) {
            const int64_t count = std::min(PART, rows - first), at = first * LD;
            if (first > 0) {
                read_part(keys, f, first, count, parts);
                for (const bool of_q : {true, false}) {
                    const float* d_pairs = (of_q ? w.dp : w.da) + at;
                    blocks::product<false>(count, key, first, {d_pairs, LD, 1}, parts.before, ld, parts.d_near, ld);
                    for (int64_t i = 0; i < count; ++i)
                        for (int64_t d = 0; d < key; d += LANES) {
                            const Float grad = simd::load(parts.d_near + i * ld + d) * simd::load(parts.near + i * ld + d);
                            add((of_q ? w.dq : w.dscaled) + (first + i) * ld + d, grad);
                            float* row = parts.k + i * ld + d;
                            if (!of_q) simd::store(row, simd::load(row) * f.beta[first + i]);
                        }
                }
                blocks::product<false>(first, key, count, {w.dp + at, 1, LD}, parts.q, ld, parts.d_before, ld);
                blocks::product<true>(first, key, count, {w.da + at, 1, LD}, parts.k, ld, parts.d_before, ld);
                for (int64_t j = 0; j < first * ld; j += ld)
                    for (int64_t d = j; d < j + key; d += LANES)
                        add(w.minus + d, simd::load(parts.d_before + d) * simd::load(parts.far + d));
            }
            each_pair(f, first, count, [&](int64_t i, int64_t j, const auto& apart) {
                const float of_q = w.dp[i * LD + j], of_k = i == j ? 0.0f : w.da[i * LD + j];
                for (int64_t d = 0; d < key; d += LANES) {
                    const int64_t row = i * ld + d, column = j * ld + d;
                    const Float e = apart(d), right = e * simd::load(keys.k + column);
                    add(w.dq + row, right * of_q);
                    add(w.dscaled + row, right * of_k);
                    add(w.minus + column,
                        e * (simd::load(keys.q + row) * of_q + simd::load(keys.k + row) * (of_k * f.beta[i])));
                }
            });
        }
    }

    void finish_row(const Keys& keys, const Factors& f, int64_t i, const Work& w, float* dbeta) const {
        Float along = {};
        for (int64_t d = 0; d < s_.key; d += LANES) {
            const int64_t at = i * s_.ld_key() + d;
            const Float g = simd::load(w.dscaled + at);
            along += g * simd::load(keys.k + at);
            simd::store(w.plus + at, simd::load(w.plus + at) + g * f.beta[i]);
        }
        dbeta[i * s_.heads] += simd::sum(along);
    }

    void write_value(int64_t token, int64_t head, int64_t rows, const Factors& f, const Work& w, int64_t index,
                     const Gradients<T>& to) const {
        const float skip = !DELTA && in_.skip ? in_.skip[head] : 0.0f;
        for (int64_t i = 0; i < rows; ++i) {
            T* dv = to.dv.at(token + i, head);
            const float *du = w.du + i * s_.ld_value(), *d_out = w.d_out + i * s_.ld_value();
            const float beta = f.beta[i];
            simd::for_each(s_.value, [=](auto, int64_t d, int64_t count) {
                Float grad = simd::load_up_to(du + d, count) * beta;
                if (!DELTA) grad += simd::load_up_to(d_out + d, count) * skip;
                simd::store_up_to(dv + d, grad, count);
            });
            if (!DELTA) to.dskip[index * s_.heads + head] += dot_value(d_out, in_.v.at(token + i, head));
        }
    }

    Shape s_;
    Inputs<T> in_;
};

}  // namespace recurrence
