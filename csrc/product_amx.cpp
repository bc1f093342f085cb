// A large product of fp32 matrices by AMX tiles, with what adapters add to it (split.h, adapters_amx.h).
//
// A part of A's columns is split once and shared by all threads; each item of work splits some columns of B for itself,
// small enough to stay in the second-level cache, and takes the rows of A past them. An element's sum runs over parts of
// DEPTH products in the order of k, whoever computes it: the result depends neither on the threads nor on the other
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

// A block of C on its way from the tiles, where it lies in `from` [rows, STEP]. Its rows are stored a few at a time, beside
// the products of the next block, which leave the vector units idle and have the time to wait for memory.
struct Out {
    bool add;  // to what is there
    int64_t rows, columns;
    float* to;
    int64_t ld;
    const float* from;

    void prefetch(int64_t first, int64_t last) const {
        for (int64_t i = first; i < std::min(last, rows); ++i) {
            __builtin_prefetch(to + i * ld, 1);
            __builtin_prefetch(to + i * ld + columns - 1, 1);
        }
    }
};

// What is added to a block where the bit of an element is 1: scale * from [rows, STEP].
struct Kept {
    const float* from;
    const uint8_t* bits;
    int64_t ld_bits;
    float scale;
};

// Rows [first, last) of a block, with what is kept.
template <bool KEPT>
SIMD_INLINE void store_rows(const Out& out, const Kept& kept, int64_t first, int64_t last) {
    const __mmask16 low = split::lanes(out.columns), high = split::lanes(out.columns - LANES);
    for (int64_t i = first; i < std::min(last, out.rows); ++i) {
        float* to = out.to + i * out.ld;
        __m512 left = _mm512_load_ps(out.from + i * STEP), right = _mm512_load_ps(out.from + i * STEP + LANES);
        if (KEPT) {
            uint32_t word;
            memcpy(&word, kept.bits + i * kept.ld_bits, sizeof word);
            const __m512 scale = _mm512_set1_ps(kept.scale);
            const float* more = kept.from + i * STEP;
            left = _mm512_mask3_fmadd_ps(scale, _mm512_load_ps(more), left, (__mmask16)word);
            right = _mm512_mask3_fmadd_ps(scale, _mm512_load_ps(more + LANES), right, (__mmask16)(word >> LANES));
        }
        if (out.add) {
            left = _mm512_add_ps(left, _mm512_maskz_loadu_ps(low, to));
            right = _mm512_add_ps(right, _mm512_maskz_loadu_ps(high, to + LANES));
        }
        _mm512_mask_storeu_ps(to, low, left);
        _mm512_mask_storeu_ps(to + LANES, high, right);
    }
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
            split::pack_right(rows + std::min(c, columns), b.ld, deep, columns - c, to + (c / LANES * steps + step) * BLOCK);
    }
}

// A chunk of A -> blocks, and the adapters' share of it.
void take_chunk(const adapters::Chunk& chunk, int64_t index, const adapters::Adapters* adapters) {
    if (adapters) {
        amx::Tiles tiles;
        adapters->take(chunk, index);
    } else {
        for (int64_t block = 0; block < chunk.blocks(); block += 2) chunk.pack(block, 0, chunk.steps);
    }
}

// Some rows of C from A already split, times some columns of B already split.
struct Item {
    bool add;
    int64_t top, row, rows, column, columns, steps;  // rows from `row` on after the first `top`
    const Bf16 *left, *right, *up;
    const adapters::Adapters* adapters;  // null where nothing more is added
};

template <bool MASKS>
void multiply_item(const Item& item, float* c, int64_t ld) {
    alignas(64) float sums[2][STEP * STEP], updates[2][STEP * STEP];  // of a block and of the one before
    const int64_t next = item.steps * BLOCK, pairs = ceil_div(item.columns, STEP), some = ceil_div(STEP, item.steps);
    const Bf16* left = item.left + item.row / LANES * next;
    Out before = {};
    Kept kept_before = {};
    int turn = 0;
    for (int64_t row = item.row; row < item.row + item.rows; row += STEP, left += 2 * next)
        for (int64_t pair = 0; pair < pairs; ++pair, turn = !turn) {
            const int64_t column = item.column + pair * STEP;
            const Bf16* up = item.adapters ? item.up + pair * item.adapters->up_size(STEP) : nullptr;
            const Out out = {item.add, std::min(STEP, item.row + item.rows - row),
                             std::min(STEP, item.columns - pair * STEP), c + (item.top + row) * ld + column, ld, sums[turn]};
            Kept kept = {};
            if (MASKS) {
                split::clear();
                item.adapters->multiply(row, column, up);
                split::store(updates[turn]);
                kept = {updates[turn], item.adapters->out_bits(item.top + row, column), item.adapters->ld_out_bits(),
                        item.adapters->out_scale()};
            }
            split::clear();
            split::multiply(item.steps, left, next, item.right + 2 * pair * next, next, [&](int64_t step) {
                store_rows<MASKS>(before, kept_before, step * some, (step + 1) * some);
                out.prefetch(step * some, (step + 1) * some);
            });
            if (item.adapters && !MASKS) item.adapters->multiply(row, column, up);
            split::store(sums[turn]);
            before = out, kept_before = kept;
        }
    store_rows<MASKS>(before, kept_before, 0, STEP);
}

void product(int threads, int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t ld_a, const Matrix& b,
             float* c, int64_t ld_c, const adapters::Adapters* adapters) {
    using adapters::CHUNK, adapters::GROUP;
    const int64_t width = item_width(columns, threads), blocks = ceil_div(columns, width);
    // few columns leave threads without work: then items have some of the rows only
    const int64_t shares = std::max<int64_t>(1, threads / std::max<int64_t>(1, blocks));
    for (int64_t k = 0; k < depth; k += DEPTH)
        for (int64_t top = 0; top < rows; top += HEIGHT) {
            const int64_t deep = std::min(DEPTH, depth - k), steps = ceil_div(deep, STEP), size = steps * BLOCK;
            const int64_t high = std::min(HEIGHT, rows - top), groups = ceil_div(high, GROUP * CHUNK);
            const bool last = k + DEPTH >= depth;
            Bf16* left = (Bf16*)common::scratch<0>(amx::padded(high) / LANES * size / 2);
            common::parallel_for(threads, groups, [=](int64_t group) {
                for (int64_t i = group * GROUP; i < (group + 1) * GROUP && i * CHUNK < high; ++i) {
                    const int64_t row = i * CHUNK, some = std::min(CHUNK, high - row);
                    take_chunk({a, ld_a, top + row, some, k, deep, steps, left + row / LANES * size, k == 0, last}, i,
                               adapters);
                }
            });
            const int64_t before = adapters ? adapters->gradient_items(deep) : 0;
            const adapters::Adapters* adding = adapters && last && adapters->adds() ? adapters : nullptr;
            const int64_t share = amx::padded(ceil_div(high, shares));
            common::parallel_for(threads, before + blocks * shares, [=](int64_t i) {
                if (i < before) return adapters->add_gradients(i, k, deep, groups);
                i -= before;
                const int64_t column = i % blocks * width, wide = std::min(width, columns - column);
                const int64_t row = i / blocks * share, some = std::min(share, high - row);
                if (some <= 0) return;
                Bf16* right = (Bf16*)common::scratch<1>(amx::padded(wide) / LANES * size / 2);
                pack_columns(b, k, deep, column, wide, right);
                Bf16* up = adding ? (Bf16*)common::scratch<2>(adding->up_size(wide) / 2) : nullptr;
                if (adding) adding->pack_up(column, wide, up);
                amx::Tiles tiles;
                const Item item = {k > 0, top, row, some, column, wide, steps, left, right, up, adding};
                if (adding && adding->masks()) multiply_item<true>(item, c, ld_c);
                else multiply_item<false>(item, c, ld_c);
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
