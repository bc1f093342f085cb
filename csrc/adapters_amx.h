// The rank-r side of a large product by AMX tiles: what adapters add to it, computed from operands that it
// has packed anyway.
//
//     P = s drop(L) D        C = L W + k drop'(P U)        dF = L^T H
//
// Forward, L is the linear's input, D is A^T, U is B^T and P is H. Backward, L is dY, D is B, U is A and P is dH; dF is
// dB, for the H of forward. P needs L's rows split and packed, as the large product does; dF reads them right after
// that; P U joins the sums of C before they are stored. So adapters read and write no wide matrix of their own.
#pragma once

#include <algorithm>

#include "rank_sums.h"
#include "split.h"

// A, B or the gradient of one adapter: element (feature, rank) lies at data[feature * ld_feature + rank * ld_rank]. Its
// features and ranks begin at these of the linear's own. All fields of these structures are 8 bytes wide.
struct Factor {
    float* data;
    int64_t ld_feature, ld_rank, first_feature, num_features, first_rank, num_ranks;
    double scale;
};

// All adapters of a linear. P is given where there are no `down`; nothing is added to C where there are no `up`. Bits
// are those of the elements that dropout keeps, of L and of C; null without dropout. The factors lie behind it.
struct LowRank {
    int64_t ranks;
    float* p;
    int64_t ld_p;
    const uint8_t* left_bits;
    int64_t ld_left_bits;
    const uint8_t* out_bits;
    int64_t ld_out_bits;
    double out_scale;
    const float* h;  // [rows, ranks]; for the gradients
    int64_t ld_h, num_down, num_up, num_gradients;

    const Factor* down() const { return (const Factor*)(this + 1); }   // features are columns of L; `scale` is s
    const Factor* up() const { return down() + num_down; }             // features are columns of C
    const Factor* gradients() const { return up() + num_up; }          // features are columns of L; added to
};

#if HAS_AMX

namespace adapters {

using common::ceil_div;
using simd::Float;
using split::BLOCK;
using split::Bf16;
using split::LANES;
using split::STEP;

constexpr int64_t CHUNK = 64;  // rows that go through all of this together
constexpr int64_t GROUP = 2;  // chunks whose share of the gradients is one part of the sum
constexpr int64_t AHEAD = 4;  // steps packed ahead of their use: a tile is not loaded from stores that are under way

struct Range {
    int64_t first, last;
};

// The part of [0, size) that the factors with features in [from, to) have ranks in.
inline Range ranks_of(int64_t count, const Factor* factors, int64_t from, int64_t to) {
    Range range = {INT64_MAX, 0};
    for (const Factor* f = factors; f < factors + count; ++f)
        if (f->first_feature < to && from < f->first_feature + f->num_features && f->num_ranks > 0)
            range = {std::min(range.first, f->first_rank), std::max(range.last, f->first_rank + f->num_ranks)};
    return range.last ? range : Range{0, 0};
}

// The part of the features that the factors with ranks in [from, to) have.
inline Range features_of(int64_t count, const Factor* factors, int64_t from, int64_t to) {
    Range range = {INT64_MAX, 0};
    for (const Factor* f = factors; f < factors + count; ++f)
        if (f->first_rank < to && from < f->first_rank + f->num_ranks && f->num_features > 0)
            range = {std::min(range.first, f->first_feature),
                     std::max(range.last, f->first_feature + f->num_features)};
    return range.last ? range : Range{0, 0};
}

// Whether the ranks of a feature lie side by side, as B's do; those of A do not, its features do.
inline bool by_feature(int64_t count, const Factor* factors) { return count > 0 && factors->ld_rank == 1; }

// All factors' elements of `features` features and 16 ranks, zeros where there is none: [features][16] where `turned`,
// which is `by_feature` of them, else [16][features].
inline void gather(int64_t count, const Factor* factors, int64_t feature, int64_t features, int64_t rank, bool turned,
                   float* block) {
    const int64_t to_feature = turned ? LANES : 1, to_rank = turned ? 1 : features;
    std::fill(block, block + features * LANES, 0.0f);
    for (const Factor* f = factors; f < factors + count; ++f) {
        const int64_t first = std::max(feature, f->first_feature), first_rank = std::max(rank, f->first_rank);
        const int64_t some = std::min(feature + features, f->first_feature + f->num_features) - first;
        const int64_t ranks = std::min<int64_t>(rank + LANES, f->first_rank + f->num_ranks) - first_rank;
        if (some <= 0 || ranks <= 0) continue;
        const float* from =
            f->data + (first - f->first_feature) * f->ld_feature + (first_rank - f->first_rank) * f->ld_rank;
        float* to = block + (first - feature) * to_feature + (first_rank - rank) * to_rank;
        if (turned)
            for (int64_t i = 0; i < some; ++i) std::copy_n(from + i * f->ld_feature, ranks, to + i * to_feature);
        else
            for (int64_t r = 0; r < ranks; ++r) std::copy_n(from + r * f->ld_rank, some, to + r * to_rank);
    }
}

// [16, 16] with its rows as columns.
inline void turn(float* block) {
    Float square[LANES];
    for (int64_t i = 0; i < LANES; ++i) square[i] = simd::load(block + i * LANES);
    simd::transpose(square);
    for (int64_t i = 0; i < LANES; ++i) simd::store(block + i * LANES, square[i]);
}

// A chunk of L's rows on its way into blocks [row block][step] of one part of the depth.
struct Chunk {
    const float* left;
    int64_t ld, row, rows, depth, deep, steps;  // rows from `row` on; columns [depth, depth + deep) of L
    Bf16* packed;
    bool first, last;  // part of the depth

    int64_t blocks() const { return amx::padded(rows) / LANES; }
    Bf16* at(int64_t block, int64_t step) const { return packed + (block * steps + step) * BLOCK; }

    // Two row blocks of steps [from, to).
    void pack(int64_t block, int64_t from, int64_t to) const {
        for (int64_t step = from; step < to; ++step)
            for (int64_t one = block; one < block + 2; ++one) {
                const int64_t first_row = std::min(one * LANES, rows);
                split::pack_left(left + (row + first_row) * ld + depth + step * STEP, ld, rows - first_row,
                                 std::min(STEP, deep - step * STEP), at(one, step));
            }
    }
};

class Adapters {
  public:
    Adapters(int threads, int64_t rows, int64_t depth, int64_t height, int64_t part, const LowRank& given)
        : g_(given), threads_(threads), part_(part),
          rank_tiles_(ceil_div(given.ranks, LANES)),
          steps_(ceil_div(depth, STEP)) {
        const int64_t groups = ceil_div(height, GROUP * CHUNK), ranks = rank_tiles_ * LANES;
        if (g_.num_down) {
            scale_ = common::scratch<4>(ranks + rows * ranks);
            sums_ = scale_ + ranks;
            std::fill_n(scale_, ranks, 0.0f);
            for (const Factor* f = g_.down(); f < g_.down() + g_.num_down; ++f)
                std::fill_n(scale_ + f->first_rank, f->num_ranks, (float)f->scale);
            pack_down();
        }
        const int64_t blocks = groups * GROUP * CHUNK / LANES;
        if (g_.num_up) left_ = (Bf16*)common::scratch<6>(blocks * rank_tiles_ * split::HALF_LEFT / 2);
        if (g_.num_gradients) parts_ = common::scratch<8>(groups * ranks * part);
    }

    bool adds() const { return g_.num_up > 0; }
    bool masks() const { return g_.out_bits != nullptr; }
    bool has_gradients() const { return g_.num_gradients > 0; }

    // Packs a chunk, the `index`-th of its pass over `height` rows, and adds its share of the gradients. With the last
    // part of the depth P is completed, since P U is needed from then on. Chunks of a group come one after the other.
    void take(const Chunk& chunk, int64_t index) const {
        for (int64_t block = 0; block < chunk.blocks(); block += 2) {
            int64_t packed = 0;
            if (chunk.last) packed = project_all(chunk, block, packed);
            chunk.pack(block, packed, chunk.steps);
        }
        sum_gradients(chunk, index);
        if (chunk.last) finish(chunk, index);
    }

    // P's share of a packed chunk, but for the last part of the depth: it can wait until the large product has read it.
    void share(const Chunk& chunk) const {
        for (int64_t block = 0; block < chunk.blocks(); block += 2) project_all(chunk, block, chunk.steps);
    }

    // The gradients of columns [depth, depth + deep) of L, from all groups of a pass: some of them for each item.
    int64_t gradient_items(int64_t deep) const { return has_gradients() ? ceil_div(deep, rank_sums::COLUMNS) : 0; }
    void add_gradients(int64_t item, int64_t depth, int64_t deep, int64_t groups) const {
        const int64_t ranks = rank_tiles_ * LANES;
        const int64_t from = depth + item * rank_sums::COLUMNS, to = from + rank_sums::COLUMNS;
        for (const Factor* f = g_.gradients(); f < g_.gradients() + g_.num_gradients; ++f) {
            const int64_t first = std::max(from, f->first_feature);
            const int64_t last = std::min({to, depth + deep, f->first_feature + f->num_features});
            for (int64_t r = 0; first < last && r < f->num_ranks; ++r) {
                const float* sums = parts_ + (f->first_rank + r) * part_ + first - depth;
                float* data = f->data + (first - f->first_feature) * f->ld_feature + r * f->ld_rank;
                rank_sums::add_groups(groups, sums, ranks * part_, last - first, (float)f->scale, data, f->ld_feature);
            }
        }
    }

    // Columns [column, + columns) of U -> half blocks [column block][rank block].
    void pack_up(int64_t column, int64_t columns, Bf16* to) const {
        const bool turned = by_feature(g_.num_up, g_.up());
        alignas(64) float block[LANES * LANES];
        for (int64_t c = column; c < column + amx::padded(columns); c += LANES)
            for (int64_t tile = 0; tile < rank_tiles_; ++tile, to += split::HALF_RIGHT) {
                gather(g_.num_up, g_.up(), c, LANES, tile * LANES, turned, block);
                if (turned) turn(block);
                split::pack_half_right(block, LANES, to);
            }
    }
    int64_t up_size(int64_t columns) const { return amx::padded(columns) / LANES * rank_tiles_ * split::HALF_RIGHT; }

    // Adds rows [row, row + 32) of a pass times 32 columns of U, the first of them `column` of C.
    SIMD_INLINE void multiply(int64_t row, int64_t column, const Bf16* up) const {
        const Range ranks = ranks_of(g_.num_up, g_.up(), column, column + STEP);
        const int64_t next_left = rank_tiles_ * split::HALF_LEFT, next = rank_tiles_ * split::HALF_RIGHT;
        const Bf16* left = left_ + row / LANES * next_left;
        for (int64_t tile = ranks.first / LANES; tile * LANES < ranks.last; ++tile)
            split::multiply_half(left + tile * split::HALF_LEFT, next_left, up + tile * split::HALF_RIGHT, next);
    }

    // The bits of C from (row, column) on, column a multiple of 8.
    const uint8_t* out_bits(int64_t row, int64_t column) const {
        return g_.out_bits + row * g_.ld_out_bits + column / 8;
    }
    int64_t ld_out_bits() const { return g_.ld_out_bits; }
    float out_scale() const { return (float)g_.out_scale; }

  private:
    // D -> blocks [rank block][step].
    void pack_down() {
        Bf16* to = down_ = (Bf16*)common::scratch<5>(rank_tiles_ * steps_ * BLOCK / 2);
        const bool turned = by_feature(g_.num_down, g_.down());
        constexpr int64_t SOME = 64;  // as long as it takes a sleeping thread to wake up
        common::parallel_for(threads_, ceil_div(rank_tiles_ * steps_, SOME), [=](int64_t item) {
            alignas(64) float block[LANES * STEP];
            for (int64_t i = item * SOME; i < std::min((item + 1) * SOME, rank_tiles_ * steps_); ++i) {
                gather(g_.num_down, g_.down(), i % steps_ * STEP, STEP, i / steps_ * LANES, turned, block);
                if (turned) split::pack_right(block, LANES, STEP, LANES, to + i * BLOCK);
                else split::pack_right_transposed(block, STEP, STEP, LANES, to + i * BLOCK);
            }
        });
    }

    // Adds a chunk's share of the gradients, for the columns of this part of the depth. By vectors: its rows lie in the
    // cache as they are, and for tiles of them as a right operand they would have to be turned, which takes as long.
    void sum_gradients(const Chunk& chunk, int64_t index) const {
        for (const Factor* f = g_.gradients(); f < g_.gradients() + g_.num_gradients; ++f) {
            const int64_t first = std::max(chunk.depth, f->first_feature);
            const int64_t columns = std::min(chunk.depth + chunk.deep, f->first_feature + f->num_features) - first;
            if (columns <= 0) continue;
            float* to = parts_ + (index / GROUP * rank_tiles_ * LANES + f->first_rank) * part_ + first - chunk.depth;
            for (int64_t r = 0; r < f->num_ranks && index % GROUP == 0; ++r) std::fill_n(to + r * part_, columns, 0.0f);
            for (int64_t row = chunk.row; row < chunk.row + chunk.rows; row += STEP) {
                const skinny::Left h = {g_.h + row * g_.ld_h + f->first_rank, 1, g_.ld_h};
                const skinny::Right<float> left = {chunk.left + row * chunk.ld + first, chunk.ld, nullptr, 0, false};
                const int64_t rows = std::min(STEP, chunk.row + chunk.rows - row);
                rank_sums::add_rows(rows, f->num_ranks, columns, h, left, to, part_);
            }
        }
    }

    // Adds 32 rows' share of P; packs what is not packed yet. Two blocks of ranks of the same features go together.
    int64_t project_all(const Chunk& chunk, int64_t block, int64_t packed) const {
        for (int64_t tile = 0; g_.num_down && tile < rank_tiles_;) {
            const Range one = given(tile), next = given(tile + 1);
            const bool two = tile + 1 < rank_tiles_ && one.first == next.first && one.last == next.last;
            packed = two ? project<2>(chunk, block, tile, one, packed) : project<1>(chunk, block, tile, one, packed);
            tile += two ? 2 : 1;
        }
        return packed;
    }

    // The features that a block of P's ranks is made from.
    Range given(int64_t tile) const {
        return features_of(g_.num_down, g_.down(), tile * LANES, (tile + 1) * LANES);
    }

    // Adds 32 rows' share of TILES blocks of ranks of P; packs what is not packed yet: the steps from `packed` on.
    template <int TILES>
    int64_t project(const Chunk& chunk, int64_t block, int64_t tile, Range features, int64_t packed) const {
        const int64_t first = std::clamp<int64_t>(features.first - chunk.depth, 0, chunk.deep) / STEP;
        const int64_t last = ceil_div(std::clamp<int64_t>(features.last - chunk.depth, 0, chunk.deep), STEP);
        if (first >= last && !chunk.first) return packed;
        alignas(64) Bf16 kept[2][2 * BLOCK];  // of a step and of the next
        split::clear();
        for (int64_t step = first; step < last; ++step) {
            const int64_t ahead = std::min(chunk.steps, step + AHEAD);
            chunk.pack(block, packed, ahead);
            packed = std::max(packed, ahead);
            const Bf16* left = chunk.at(block, step);
            const Bf16* down = down_ + (tile * steps_ + chunk.depth / STEP + step) * BLOCK;
            int64_t next = chunk.steps * BLOCK;
            if (g_.left_bits) {
                if (step == first) keep(chunk, block, step, kept[step % 2]);
                if (step + 1 < last) keep(chunk, block, step + 1, kept[(step + 1) % 2]);
                left = kept[step % 2], next = BLOCK;
            }
            if (TILES == 1) split::multiply_narrow(1, left, next, down);
            else split::multiply(1, left, next, down, steps_ * BLOCK, [](int64_t) {});
        }
        add_sums<TILES>(chunk, block, tile);
        return packed;
    }

    // The tiles' sums, of 32 rows and TILES blocks of ranks, to those of earlier parts of the depth.
    template <int TILES>
    void add_sums(const Chunk& chunk, int64_t block, int64_t tile) const {
        alignas(64) float out[STEP * STEP];
        split::store(out);
        float* to = sums_ + (chunk.row + block * LANES) * rank_tiles_ * LANES + tile * LANES;
        for (int64_t i = 0; i < std::min(STEP, chunk.rows - block * LANES); ++i, to += rank_tiles_ * LANES) {
            Float sums[2] = {simd::load(out + i * STEP), simd::load(out + i * STEP + LANES)};
            if (TILES == 1) sums[0] += sums[1];
            for (int64_t one = 0; one < TILES; ++one)
                simd::store(to + one * LANES, chunk.first ? sums[one] : sums[one] + simd::load(to + one * LANES));
        }
    }

    // What dropout keeps of two row blocks.
    void keep(const Chunk& chunk, int64_t block, int64_t step, Bf16* to) const {
        for (int64_t one = block; one < block + 2; ++one, to += BLOCK) {
            const int64_t row = chunk.row + one * LANES, column = chunk.depth + step * STEP;
            split::keep_left(chunk.at(one, step), chunk.rows - one * LANES,
                             g_.left_bits + row * g_.ld_left_bits + column / 8, g_.ld_left_bits, to);
        }
    }

    // P is complete: scales and writes it, and packs it for P U.
    void finish(const Chunk& chunk, int64_t index) const {
        const int64_t ld = rank_tiles_ * LANES;
        for (int64_t row = chunk.row; g_.num_down && row < chunk.row + chunk.rows; ++row)
            for (int64_t r = 0; r < g_.ranks; r += LANES)
                simd::store_up_to(g_.p + row * g_.ld_p + r, simd::load(scale_ + r) * simd::load(sums_ + row * ld + r),
                                  g_.ranks - r);
        if (!adds()) return;
        Bf16* to = left_ + index * CHUNK / LANES * rank_tiles_ * split::HALF_LEFT;
        for (int64_t block = 0; block < chunk.blocks(); ++block)
            for (int64_t tile = 0; tile < rank_tiles_; ++tile, to += split::HALF_LEFT) {
                const int64_t row = std::min(block * LANES, chunk.rows);
                split::pack_half_left(g_.p + (chunk.row + row) * g_.ld_p + tile * LANES, g_.ld_p, chunk.rows - row,
                                      g_.ranks - tile * LANES, to);
            }
    }

    const LowRank& g_;
    int threads_;
    int64_t part_, rank_tiles_, steps_;
    float *scale_ = nullptr, *sums_ = nullptr, *parts_ = nullptr;
    Bf16 *down_ = nullptr, *left_ = nullptr;
};

}  // namespace adapters

#endif
