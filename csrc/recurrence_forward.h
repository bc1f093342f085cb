// Outputs and last states of a recurrence in chunks (recurrence.h), and its step from one token to the next.
#pragma once

#include "recurrence_chunk.h"

namespace recurrence {

#if SIMD_AVX512
constexpr int STEP_VECTORS = 8;  // 16 sums
#else
constexpr int STEP_VECTORS = 4;  // 8 sums of 16 registers
#endif

template <class T, bool DELTA, bool CHANNEL>
class Forward : Chunks<T, DELTA, CHANNEL> {
  public:
    Forward(const Shape& shape, const Inputs<T>& inputs) : Chunks<T, DELTA, CHANNEL>(shape, inputs) {}

    // `final` may be the memory of `initial` where a piece receives and sends the same state.
    void run(int threads, const std::vector<Piece>& pieces, const float* initial, const Heads<T>& out, float* final,
             float* kept) const {
        each(threads, pieces, [&](int64_t index, int64_t group, int64_t first_head, int64_t end_head) {
            const Piece& piece = pieces[index];
            if (piece.length == 1) step(piece, group, first_head, end_head, initial, out, final);
            else forward_piece(piece, group, first_head, end_head, initial, out, final, kept);
        });
    }

  private:
    using Base = Chunks<T, DELTA, CHANNEL>;
    using typename Base::Keys;
    using typename Base::Factors;
    using typename Base::Parts;
    using Base::advance;
    using Base::copy_state;
    using Base::each;
    using Base::pairs;
    using Base::read_factors;
    using Base::read_keys;
    using Base::read_row;
    using Base::read_state;
    using Base::scale_rows;
    using Base::solve;
    using Base::state_at;
    using Base::write_state;
    using Base::in_;
    using Base::s_;
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
        int64_t e = 0;
        for (; e + STEP_VECTORS * LANES <= s_.value; e += STEP_VECTORS * LANES)
            step_columns<STEP_VECTORS>(q, k, qk, f, before, after, v, out, e, LANES);
        for (; e < s_.value; e += LANES)
            step_columns<1>(q, k, qk, f, before, after, v, out, e, std::min<int64_t>(LANES, s_.value - e));
    }

    // Columns of a state from `e` on, VECTORS of them: `count` lanes each. Its rows are read in the order of memory.
    template <int VECTORS>
    SIMD_INLINE void step_columns(const float* q, const float* k, float qk, const Factors& f, const float* before,
                                  float* after, const float* v, float* out, int64_t e, int64_t count) const {
        const auto at = [&](const float* state, int64_t d, int i) {
            return simd::load_up_to(state + d * s_.value + e + i * LANES, count) * f.grow[CHANNEL ? d : 0];
        };
        Float u[VECTORS] = {}, sum[VECTORS] = {};
        for (int64_t d = 0; before && d < s_.key; ++d)
#pragma GCC unroll 8
            for (int i = 0; i < VECTORS; ++i) {
                const Float row = at(before, d, i);
                u[i] += row * k[d];
                sum[i] += row * q[d];
            }
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; ++i) {
            u[i] = (simd::load_up_to(v + e + i * LANES, count) - u[i]) * f.beta[0];
            simd::store_up_to(out + e + i * LANES, sum[i] + u[i] * qk, count);
        }
        for (int64_t d = 0; after && d < s_.key; ++d)
#pragma GCC unroll 8
            for (int i = 0; i < VECTORS; ++i) {
                const Float added = u[i] * k[d], row = before ? added + at(before, d, i) : added;
                simd::store_up_to(after + d * s_.value + e + i * LANES, row, count);
            }
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
};

}  // namespace recurrence
