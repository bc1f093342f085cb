// A large product of fp32 matrices by AMX tiles, with what adapters add to it (split.h, adapters_amx.h).
//
// A part of A's columns is split once and shared by all threads; each item of work splits some columns of B for itself,
// small enough to stay in the second-level cache, and takes the rows of A past them. An element's sum runs over parts
// of DEPTH products in the order of k, on whichever thread: the result depends neither on the threads nor on the other
// rows and columns.
#include <algorithm>

#include "adapters_amx.h"

#if HAS_AMX

namespace {

using common::ceil_div;
using split::BLOCK;
using split::Bf16;
using split::LANES;
using split::STEP;

constexpr int64_t DEPTH = 512;     // of a part
constexpr int64_t HEIGHT = 2048;   // rows of A that are split at a time
constexpr int64_t COLUMNS = 256;   // of an item, at most
constexpr int64_t FEW_COLUMNS = 128;
constexpr int64_t ROWS = adapters::GROUP * adapters::CHUNK;  // of a group

// A block of C on its way from the tiles, where it lies in `from` [rows, STEP]; and what is added to it where the bit
// of an element is 1: scale * kept [rows, STEP].
struct Out {
    bool add;  // to what is there
    int64_t rows, columns, ld;
    float* to;
    const float *from, *kept;
    const uint8_t* bits;
    int64_t ld_bits;
    float scale;

    bool full() const { return rows == STEP && columns == STEP; }

    void advance(int64_t some) {
        to += some * ld, from += some * STEP, kept += some * STEP, bits += some * ld_bits;
    }
};

template <bool KEPT>
SIMD_INLINE void store_row(const Out& out, int64_t row, __mmask16 low, __mmask16 high) {
    float* to = out.to + row * out.ld;
    __m512 left = _mm512_load_ps(out.from + row * STEP), right = _mm512_load_ps(out.from + row * STEP + LANES);
    if (KEPT) {
        uint32_t word;
        memcpy(&word, out.bits + row * out.ld_bits, sizeof word);
        const __m512 scale = _mm512_set1_ps(out.scale);
        const float* kept = out.kept + row * STEP;
        left = _mm512_mask3_fmadd_ps(scale, _mm512_load_ps(kept), left, (__mmask16)word);
        right = _mm512_mask3_fmadd_ps(scale, _mm512_load_ps(kept + LANES), right, (__mmask16)(word >> LANES));
    }
    if (out.add) {
        left = _mm512_add_ps(left, _mm512_maskz_loadu_ps(low, to));
        right = _mm512_add_ps(right, _mm512_maskz_loadu_ps(high, to + LANES));
    }
    _mm512_mask_storeu_ps(to, low, left);
    _mm512_mask_storeu_ps(to + LANES, high, right);
}

template <bool KEPT>
void store_block(const Out& out) {
    for (int64_t i = 0; i < out.rows; ++i)
        store_row<KEPT>(out, i, split::lanes(out.columns), split::lanes(out.columns - LANES));
}

struct Matrix {
    const float* data;
    int64_t ld;
    bool transposed;
};

// Columns of an item: as even a share for each thread as there is, and of those that are equal the widest.
int64_t item_width(int64_t columns, int threads) {
    int64_t best = COLUMNS, least = INT64_MAX;
    for (int64_t width = COLUMNS; width >= FEW_COLUMNS; width -= STEP) {
        const int64_t share = ceil_div(ceil_div(columns, width), threads) * width;
        if (share < least) best = width, least = share;
    }
    return best;
}

// Columns [column, + columns) of B, rows [k, + depth) -> blocks [column block][step]. What is past the end is not read.
void pack_columns(const Matrix& b, int64_t k, int64_t depth, int64_t column, int64_t columns, Bf16* to) {
    const int64_t steps = ceil_div(depth, STEP);
    if (b.transposed) {
        for (int64_t c = 0; c < amx::padded(columns); c += LANES)
            for (int64_t step = 0; step < steps; ++step, to += BLOCK)
                split::pack_right_transposed(b.data + (column + std::min(c, columns)) * b.ld + k + step * STEP, b.ld,
                                             std::min(STEP, depth - step * STEP), columns - c, to);
        return;
    }
    for (int64_t step = 0; step < steps; ++step) {
        const float* rows = b.data + (k + step * STEP) * b.ld + column;
        const int64_t deep = std::min(STEP, depth - step * STEP);
        // rows may lie pages apart, which the processor does not look ahead over
        for (int64_t i = STEP; i < std::min(2 * STEP, depth - step * STEP); ++i)
            for (int64_t c = 0; c < columns; c += LANES) _mm_prefetch((const char*)(rows + i * b.ld + c), _MM_HINT_T0);
        for (int64_t c = 0; c < amx::padded(columns); c += LANES)
            split::pack_right(rows + std::min(c, columns), b.ld, deep, columns - c,
                              to + (c / LANES * steps + step) * BLOCK);
    }
}

// Some rows of A, and some of its columns: split once, for all columns of C.
struct Part {
    const float* a;
    int64_t ld, top, rows, depth, deep, steps;  // rows from `top` on, columns from `depth` on
    Bf16* left;
    bool first, last;  // part of the depth

    int64_t groups() const { return ceil_div(rows, ROWS); }
    adapters::Chunk chunk(int64_t index) const {
        const int64_t row = index * adapters::CHUNK;
        return {a, ld, top + row, std::min(adapters::CHUNK, rows - row), depth, deep, steps,
                left + row / LANES * steps * BLOCK, first, last};
    }
    template <class Work>
    void for_chunks(int64_t group, const Work& work) const {
        for (int64_t i = group * adapters::GROUP; i < (group + 1) * adapters::GROUP && i * adapters::CHUNK < rows; ++i)
            work(chunk(i), i);
    }
};

// The chunks of a group -> blocks.
void pack_group(const Part& part, int64_t group, const adapters::Adapters* adapters) {
    if (adapters) {
        amx::Tiles tiles;
        part.for_chunks(group, [=](const adapters::Chunk& chunk, int64_t i) { adapters->take(chunk, i); });
    } else {
        part.for_chunks(group, [](const adapters::Chunk& chunk, int64_t) {
            for (int64_t block = 0; block < chunk.blocks(); block += 2) chunk.pack(block, 0, chunk.steps);
        });
    }
}

// Some rows of C from a part of A, times some columns of B that have been split.
struct Item {
    const Part& part;
    int64_t row, rows, column, columns;  // rows of the part
    const Bf16 *right, *up;              // up: null where nothing is added
    const adapters::Adapters* adapters;  // or null
    int64_t number, number_of;           // among the items on the same rows; each has its share of the groups

    bool shares(int64_t group) const { return adapters && !part.last && group % number_of == number; }
};

// Out of line: the loop that it is called from holds its state in registers.
__attribute__((noinline)) void share_group(const Item& item, int64_t group) {
    item.part.for_chunks(group, [&](const adapters::Chunk& chunk, int64_t) { item.adapters->share(chunk); });
}

// A block is stored beside the products of the next one, which leave the vector units idle and have the time to wait
// for memory: SOME rows with each step of these.
template <bool MASKS, int SOME>
void multiply_item(const Item& item, float* c, int64_t ld) {
    alignas(64) float sums[2][STEP * STEP], updates[2][STEP * STEP];  // of a block and of the one before
    const Part part = item.part;
    const int64_t next = part.steps * BLOCK, pairs = ceil_div(item.columns, STEP);
    Out before = {};
    int turn = 0;
    for (int64_t row = item.row; row < item.row + item.rows; row += STEP) {
        const Bf16* left = part.left + row / LANES * next;
        for (int64_t pair = 0; pair < pairs; ++pair, turn = !turn) {
            const int64_t column = item.column + pair * STEP;
            const Bf16 *right = item.right + 2 * pair * next, *up = item.up;
            if (up) up += pair * item.adapters->up_size(STEP);
            const int64_t high = std::min(STEP, item.row + item.rows - row);
            const int64_t wide = std::min(STEP, item.columns - pair * STEP);
            Out out = {!part.first, high, wide, ld, c + (part.top + row) * ld + column, sums[turn], updates[turn],
                       nullptr, 0, 0};
            if (MASKS) {
                split::clear();
                item.adapters->multiply(row, column, up);
                split::store(updates[turn]);
                out.bits = item.adapters->out_bits(part.top + row, column), out.ld_bits = item.adapters->ld_out_bits();
                out.scale = item.adapters->out_scale();
            }
            split::clear();
            if (before.full()) {
                const float* to = out.to;
                split::multiply(part.steps, left, next, right, next, [&](int64_t step) {
                    if (step >= STEP / SOME) return;
#pragma GCC unroll 32
                    for (int64_t i = 0; i < SOME; ++i) {
                        store_row<MASKS>(before, i, 0xFFFF, 0xFFFF);
                        _mm_prefetch((const char*)(to + i * ld), _MM_HINT_T0);
                        _mm_prefetch((const char*)(to + i * ld + STEP - 1), _MM_HINT_T0);
                    }
                    before.advance(SOME), to += SOME * ld;
                });
            } else {
                store_block<MASKS>(before);
                split::multiply(part.steps, left, next, right, next, [](int64_t) {});
            }
            if (up && !MASKS) item.adapters->multiply(row, column, up);
            split::store(sums[turn]);
            before = out;
        }
        // once the group's rows are in the cache, which takes no time while the tiles are at work
        if (((row + STEP) % ROWS == 0 || row + STEP >= item.row + item.rows) && item.shares(row / ROWS))
            share_group(item, row / ROWS);
    }
    store_block<MASKS>(before);
}

template <bool MASKS>
void multiply_item(const Item& item, float* c, int64_t ld) {
    const int64_t steps = item.part.steps;
    if (steps >= 16) multiply_item<MASKS, 2>(item, c, ld);
    else if (steps >= 8) multiply_item<MASKS, 4>(item, c, ld);
    else multiply_item<MASKS, 32>(item, c, ld);
}

// An item's block of C, but for the right operand: it is split here.
void multiply_columns(const Matrix& b, Item item, float* c, int64_t ld) {
    const Part part = item.part;
    const bool adds = part.last && item.adapters && item.adapters->adds();
    Bf16* right = (Bf16*)common::scratch<1>(amx::padded(item.columns) / LANES * part.steps * BLOCK / 2);
    pack_columns(b, part.depth, part.deep, item.column, item.columns, right);
    Bf16* up = adds ? (Bf16*)common::scratch<2>(item.adapters->up_size(item.columns) / 2) : nullptr;
    if (adds) item.adapters->pack_up(item.column, item.columns, up);
    item.right = right, item.up = up;
    amx::Tiles tiles;
    if (adds && item.adapters->masks()) multiply_item<true>(item, c, ld);
    else multiply_item<false>(item, c, ld);
}

void product(int threads, int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t ld_a, const Matrix& b,
             float* c, int64_t ld_c, const adapters::Adapters* adapters) {
    const int64_t width = item_width(columns, threads);
    const int64_t blocks = std::max<int64_t>(1, ceil_div(columns, width));  // without columns adapters have work still
    // few columns leave threads without work: then items have some of the rows only
    const int64_t shares = std::max<int64_t>(1, threads / blocks);
    for (int64_t k = 0; k < depth; k += DEPTH)
        for (int64_t top = 0; top < rows; top += HEIGHT) {
            const int64_t deep = std::min(DEPTH, depth - k), steps = ceil_div(deep, STEP);
            const int64_t high = std::min(HEIGHT, rows - top);
            Bf16* left = (Bf16*)common::scratch<0>(amx::padded(high) / LANES * steps * BLOCK / 2);
            const Part part = {a, ld_a, top, high, k, deep, steps, left, k == 0, k + DEPTH >= depth};
            common::parallel_for(threads, part.groups(), [=, &part](int64_t i) { pack_group(part, i, adapters); });
            const int64_t share = ceil_div(ceil_div(high, shares), ROWS) * ROWS, items = blocks * shares;
            // the gradients' sums are complete: to add them are the short items that come last
            const int64_t sums = adapters ? adapters->gradient_items(deep) : 0;
            common::parallel_for(threads, items + sums, [=, &part](int64_t i) {
                if (i >= items) return adapters->add_gradients(i - items, k, deep, part.groups());
                const int64_t column = i % blocks * width, row = i / blocks * share;
                const int64_t some = std::min(share, high - row), wide = std::min(width, columns - column);
                if (some > 0)
                    multiply_columns(b, {part, row, some, column, wide, nullptr, nullptr, adapters, i % blocks, blocks},
                                     c, ld_c);
            });
        }
}

}  // namespace

#endif

// has: 1 where engine_product_amx can be called.
EXPORT void engine_has_amx(int* has) {
#if HAS_AMX
    static const bool found = amx::ask();
    *has = found;
#else
    *has = 0;
#endif
}

// As engine_product; depth is at least 1. With adapters, see LowRank; null without.
EXPORT void engine_product_amx(int threads, int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t ld_a,
                               const float* b, int64_t ld_b, int transposed, float* c, int64_t ld_c,
                               const LowRank* low_rank) {
#if HAS_AMX
    const Matrix right = {b, ld_b, transposed != 0};
    if (!low_rank) return product(threads, rows, columns, depth, a, ld_a, right, c, ld_c, nullptr);
    adapters::Adapters adapters(threads, rows, depth, std::min(rows, HEIGHT), DEPTH, *low_rank);
    product(threads, rows, columns, depth, a, ld_a, right, c, ld_c, &adapters);
#else
    (void)threads, (void)rows, (void)columns, (void)depth, (void)a, (void)ld_a, (void)b, (void)ld_b;
    (void)transposed, (void)c, (void)ld_c, (void)low_rank;
#endif
}
REPLAYED(engine_product_amx)
