// Gradients of a recurrence in chunks (recurrence.h).
#pragma once

#include <memory>

#include "recurrence_chunk.h"

namespace recurrence {

template <class T, bool DELTA, bool CHANNEL>
class Backward : Chunks<T, DELTA, CHANNEL> {
  public:
    Backward(const Shape& shape, const Inputs<T>& inputs) : Chunks<T, DELTA, CHANNEL>(shape, inputs) {}

    void run(int threads, const std::vector<Piece>& pieces, const float* initial, const float* kept,
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
    using Base = Chunks<T, DELTA, CHANNEL>;
    using typename Base::Keys;
    using typename Base::Factors;
    using typename Base::Parts;
    using Base::advance;
    using Base::apart;
    using Base::copy_state;
    using Base::each;
    using Base::each_pair;
    using Base::factor;
    using Base::last_factor;
    using Base::lower;
    using Base::pairs;
    using Base::read_factors;
    using Base::read_keys;
    using Base::read_part;
    using Base::read_state;
    using Base::scale_rows;
    using Base::solve;
    using Base::state_at;
    using Base::write_state;
    using Base::in_;
    using Base::s_;
    void sum_parts(const float* part, int64_t distance, int64_t count, T* to) const {
        simd::for_each(s_.key, [=](auto, int64_t d, int64_t lanes) {
            Float sum = {};
            for (int64_t i = 0; i < count; ++i) sum += simd::load_up_to(part + i * distance + d, lanes);
            simd::store_up_to(to + d, sum, lanes);
        });
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
};

}  // namespace recurrence
