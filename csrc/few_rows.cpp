// A product with few rows, C = A B^T: activations of a few tokens times a frozen weight, where to read the weight costs
// more than to multiply by it.
//
// An item of work is some rows of B, which are read once, in order, while those of A stay in the cache. A tile has as
// many sums as registers hold; while it is made, the rows of the next one are fetched. Each element is summed along
// the depth in LANES sums, which are then added one after the other: the result depends neither on the threads nor on
// the other rows and columns.
#include <algorithm>

#include "common.h"
#include "simd.h"

namespace {

using simd::Float;
using simd::LANES;

#if SIMD_AVX512
constexpr int MOST_ROWS = 8, MOST_SUMS = 24;  // 8 x 3 sums, 3 operands, 1 of A: 28 of 32 registers
#else
constexpr int MOST_ROWS = 4, MOST_SUMS = 12;  // 4 x 3 sums, 3 operands: 15 of 16 registers
#endif
constexpr int64_t ITEM = 96;   // rows of B; a multiple of every tile's
constexpr int64_t STRIP = 12;  // those that all rows of A pass by before the next ones, where one tile lacks room for A

template <class T>
struct Operands {
    const T *a, *b;
    int64_t ld_a, ld_b, rows, columns, depth;
    T* c;
    int64_t ld_c;
};

// Rows of B in a tile of so many of A: one row alone needs more of them to hide the latency of a sum.
constexpr int tile_columns(int rows) { return rows == 1 ? 8 : rows <= 4 && MOST_SUMS >= 16 ? 4 : 3; }

template <int ROWS, int COLUMNS, class T>
SIMD_INLINE void add_products(const T* a, int64_t ld_a, const T* b, int64_t ld_b, int64_t k, int64_t count,
                              Float (&sums)[ROWS * COLUMNS]) {
    Float operand[COLUMNS];
#pragma GCC unroll 8
    for (int j = 0; j < COLUMNS; ++j) operand[j] = simd::load_up_to(b + j * ld_b + k, count);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
        const Float factor = simd::load_up_to(a + i * ld_a + k, count);
#pragma GCC unroll 8
        for (int j = 0; j < COLUMNS; ++j) sums[i * COLUMNS + j] += factor * operand[j];
    }
}

template <int ROWS, int COLUMNS, class T>
void tile(const Operands<T>& o, int64_t row, int64_t column, bool fetch) {
    Float sums[ROWS * COLUMNS] = {};
    const T *a = o.a + row * o.ld_a, *b = o.b + column * o.ld_b;
    const T* next = b + COLUMNS * o.ld_b;
    int64_t k = 0;
    for (; k + LANES <= o.depth; k += LANES) {
        add_products<ROWS, COLUMNS>(a, o.ld_a, b, o.ld_b, k, (int64_t)LANES, sums);
        if (fetch)
#pragma GCC unroll 8
            for (int j = 0; j < COLUMNS; ++j) __builtin_prefetch(next + j * o.ld_b + k, 0, 2);
    }
    if (k < o.depth) add_products<ROWS, COLUMNS>(a, o.ld_a, b, o.ld_b, k, o.depth - k, sums);
    alignas(64) float found[(ROWS * COLUMNS + LANES - 1) / LANES * LANES];
    simd::lane_sums(sums, found);
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < COLUMNS; ++j)
            simd::store_one(o.c + (row + i) * o.ld_c + column + j, found[i * COLUMNS + j]);
}

// Rows of A against rows [column, end) of B.
template <int ROWS, class T>
void columns_of(const Operands<T>& o, int64_t row, int64_t column, int64_t end) {
    constexpr int COLUMNS = tile_columns(ROWS);
    for (; column + COLUMNS <= end; column += COLUMNS)
        tile<ROWS, COLUMNS>(o, row, column, row == 0 && column + 2 * COLUMNS <= o.columns);
    for (; column < end; ++column) tile<ROWS, 1>(o, row, column, false);
}

template <class T>
void rows_of(const Operands<T>& o, int64_t row, int64_t count, int64_t column, int64_t end) {
    switch (count) {
        case 1: columns_of<1>(o, row, column, end); break;
        case 2: columns_of<2>(o, row, column, end); break;
        case 3: columns_of<3>(o, row, column, end); break;
        case 4: columns_of<4>(o, row, column, end); break;
#if SIMD_AVX512
        case 5: columns_of<5>(o, row, column, end); break;
        case 6: columns_of<6>(o, row, column, end); break;
        case 7: columns_of<7>(o, row, column, end); break;
        case 8: columns_of<8>(o, row, column, end); break;
#endif
    }
}

template <class T>
void multiply(int threads, const Operands<T>& o) {
    common::parallel_for(threads, common::ceil_div(o.columns, ITEM), [&](int64_t item) {
        const int64_t end = std::min(o.columns, (item + 1) * ITEM);
        const int64_t strip = o.rows <= MOST_ROWS ? ITEM : STRIP;
        for (int64_t column = item * ITEM; column < end; column += strip)
            for (int64_t row = 0; row < o.rows; row += MOST_ROWS)
                rows_of(o, row, std::min<int64_t>(MOST_ROWS, o.rows - row), column, std::min(end, column + strip));
    });
}

}  // namespace

// c [rows, columns] = a [rows, depth] * the transpose of b [columns, depth]. c must not overlap a or b.
EXPORT void engine_product_few_rows(int threads, int type, int64_t rows, int64_t columns, int64_t depth, const void* a,
                                    int64_t ld_a, const void* b, int64_t ld_b, void* c, int64_t ld_c) {
    simd::with_type(type, [=](auto zero) {
        using T = decltype(zero);
        multiply<T>(threads, {(const T*)a, (const T*)b, ld_a, ld_b, rows, columns, depth, (T*)c, ld_c});
    });
}
REPLAYED(engine_product_few_rows)
