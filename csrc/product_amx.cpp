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

// A block of C on its way from the tiles.
struct Out {
    bool add;                // to what is there
    int64_t rows, columns;
    float* to;
    int64_t ld;
};

// What is added to a block where the bit of an element is 1: scale * from [rows, STEP].
struct Kept {
    const float* from;
    const uint8_t* bits;
    int64_t ld_bits;
    float scale;
};

// to (+)= from [rows, STEP], with what is kept.
template <bool KEPT>
void store_block(const Out& out, const float* from, const Kept& kept) {
    const __mmask16 low = split::lanes(out.columns), high = split::lanes(out.columns - LANES);
    const __m512 scale = _mm512_set1_ps(kept.scale);
    const float* more = kept.from;
    const uint8_t* bits = kept.bits;
    float* to = out.to;
    for (int64_t i = 0; i < out.rows; ++i, from += STEP, to += out.ld) {
        __m512 first = _mm512_load_ps(from), second = _mm512_load_ps(from + LANES);
        if (KEPT) {
            uint32_t word;
            memcpy(&word, bits, sizeof word);
            first = _mm512_mask3_fmadd_ps(scale, _mm512_load_ps(more), first, (__mmask16)word);
            second = _mm512_mask3_fmadd_ps(scale, _mm512_load_ps(more + LANES), second, (__mmask16)(word >> LANES));
            more += STEP, bits += kept.ld_bits;
        }
        if (out.add) {
            first = _mm512_add_ps(first, _mm512_maskz_loadu_ps(low, to));
            second = _mm512_add_ps(second, _mm512_maskz_loadu_ps(high, to + LANES));
        }
        _mm512_mask_storeu_ps(to, low, first);
        _mm512_mask_storeu_ps(to + LANES, high, second);
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

// Columns [column, + columns) of B, rows [k, + depth) -> blocks [column block][step].
void pack_columns(const Matrix& b, int64_t k, int64_t depth, int64_t column, int64_t columns, Bf16* to) {
    for (int64_t c = 0; c < amx::padded(columns); c += LANES)
        for (int64_t from = 0; from < depth; from += STEP, to += BLOCK) {
            const int64_t deep = std::min(STEP, depth - from), wide = std::min<int64_t>(LANES, columns - c);
            const int64_t row = k + from, at = column + std::min(c, columns);  // past the end nothing is read
            if (b.transposed) split::pack_right_transposed(b.data + at * b.ld + row, b.ld, deep, wide, to);
            else split::pack_right(b.data + row * b.ld + at, b.ld, deep, wide, to);
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

void multiply_item(const Item& item, float* c, int64_t ld) {
    alignas(64) float out[STEP * STEP], kept[STEP * STEP];
    const int64_t next = item.steps * BLOCK, pairs = ceil_div(item.columns, STEP);
    const Bf16* left = item.left + item.row / LANES * next;
    const bool adds = item.adapters != nullptr, masks = adds && item.adapters->masks();
    for (int64_t row = item.row; row < item.row + item.rows; row += STEP, left += 2 * next)
        for (int64_t pair = 0; pair < pairs; ++pair) {
            const int64_t column = item.column + pair * STEP;
            const Bf16* up = adds ? item.up + pair * item.adapters->up_size(STEP) : nullptr;
            if (masks) {
                split::clear();
                item.adapters->multiply(row, column, up);
                split::store(kept);
            }
            split::clear();
            split::multiply(item.steps, left, next, item.right + 2 * pair * next, next);
            if (adds && !masks) item.adapters->multiply(row, column, up);
            split::store(out);
            const Out block = {item.add, std::min(STEP, item.row + item.rows - row),
                               std::min(STEP, item.columns - pair * STEP), c + (item.top + row) * ld + column, ld};
            if (masks)
                store_block<true>(block, out, {kept, item.adapters->out_bits(item.top + row, column),
                                               item.adapters->ld_out_bits(), item.adapters->out_scale()});
            else
                store_block<false>(block, out, {});
        }
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
                multiply_item({k > 0, top, row, some, column, wide, steps, left, right, up, adding}, c, ld_c);
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
