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
#include <cstdint>
#include <numeric>
#include <vector>

#include "blocks.h"
#include "common.h"
#include "heads.h"

namespace recurrence {

using heads::Heads;

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

}  // namespace recurrence
