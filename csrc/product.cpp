// A large product in fp32, C = A B with A read by rows and B by rows or by columns: an activation times a frozen
// weight, either way round. And C += A^T B, a weight's gradient.
//
// An item of work is some columns of C for some rows of it. A part of B's rows is packed into panels that stay in the
// second-level cache while the rows of A pass by, so packing costs one read of B an item. Each element is summed in the
// order of k, SUM products at a time, on whichever thread and however the work is cut: the result depends neither
// on the threads nor on the other rows and columns.
#include <algorithm>
#include <memory>

#include "common.h"
#include "simd.h"
#include "tiles.h"

namespace {

using common::ceil_div;
using simd::Float;
using simd::LANES;
using tiles::PANEL;
using tiles::ROWS;

constexpr int64_t MOST_DEPTH = 1152;  // of a part; long, as each further part reads and writes C once more
constexpr int64_t COLUMNS = 256;      // of an item: about a megabyte of panels
constexpr int64_t FEW_COLUMNS = 128;
constexpr int64_t SUM = 384;          // products of one running sum: longer ones round worse than other libraries' do
constexpr int64_t TURNED = 4096;       // rows of A^T at a time
constexpr int64_t AHEAD = 8;          // rows of B that are asked for before they are packed

// b [depth, columns] -> panels. Row after row over all panels: the rows of B are far apart, their elements are not.
void pack_rows(const float* b, int64_t ld, int64_t depth, int64_t columns, float* panels) {
    for (int64_t k = 0; k < depth; ++k, b += ld) {
        if (k + AHEAD < depth)
            for (int64_t c = 0; c < columns; c += LANES) __builtin_prefetch(b + AHEAD * ld + c);
        for (int64_t c = 0; c < columns; c += LANES) {
            const int64_t panel = c / PANEL * PANEL, width = tiles::panel_width(columns, panel);
            simd::store(panels + panel * depth + k * width + (c - panel), simd::load_up_to(b + c, columns - c));
        }
    }
}

// Parts of about equal depth: a short one would read and write C for little.
int64_t part_depth(int64_t depth) {
    return ceil_div(ceil_div(depth, std::max<int64_t>(1, ceil_div(depth, MOST_DEPTH))), SUM) * SUM;
}

// One row tile of one panel, the first sum of an element stored or added.
void multiply_tile(bool add, int64_t rows, const tiles::Left& left, const float* panel, int64_t width, int64_t vectors,
                   int64_t depth, float* c, int64_t ld_c) {
    for (int64_t k = 0; k < depth; k += SUM, add = true) {
        const tiles::Left from = {left.data + k, left.row, 1};
        const int64_t some = std::min(SUM, depth - k);
        if (add) tiles::tile_rows<true>(rows, from, panel + k * width, width, vectors, some, c, ld_c);
        else tiles::tile_rows<false>(rows, from, panel + k * width, width, vectors, some, c, ld_c);
    }
}

// c[rows, columns] (+)= a[rows, depth] * panels.
void multiply(bool add, int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t ld_a, const float* panels,
              float* c, int64_t ld_c) {
    alignas(64) float edge[ROWS * LANES];
    const int64_t whole = columns / LANES * LANES;
    for (int64_t row = 0; row < rows; row += ROWS) {
        const int64_t count = std::min<int64_t>(ROWS, rows - row);
        const tiles::Left left = {a + row * ld_a, ld_a, 1};
        float* to = c + row * ld_c;
        for (int64_t column = 0; column < whole; column += PANEL)
            multiply_tile(add, count, left, panels + column * depth, tiles::panel_width(columns, column),
                          std::min(PANEL, whole - column) / LANES, depth, to + column, ld_c);
        if (whole == columns) continue;
        // a part of a vector, which a tile must not store to C
        const int64_t panel = whole / PANEL * PANEL, width = tiles::panel_width(columns, panel);
        for (int64_t i = 0; i < count * LANES; ++i) {
            const int64_t j = whole + i % LANES;
            edge[i] = add && j < columns ? to[i / LANES * ld_c + j] : 0.0f;
        }
        multiply_tile(true, count, left, panels + panel * depth + (whole - panel), width, 1, depth, edge, LANES);
        for (int64_t i = 0; i < count; ++i)
            std::copy(edge + i * LANES, edge + i * LANES + columns - whole, to + i * ld_c + whole);
    }
}

// c (+)= a [rows, depth] * b, where b is [depth, columns] or, `transposed`, kept as [columns, depth].
void product(int threads, bool add, int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t ld_a,
             const float* b, int64_t ld_b, bool transposed, float* c, int64_t ld_c) {
    // few items leave threads without work at the end
    const int64_t width = ceil_div(columns, COLUMNS) >= 16 * (int64_t)threads ? COLUMNS : FEW_COLUMNS;
    const int64_t blocks = ceil_div(columns, width), wanted = 4 * (int64_t)threads;
    const int64_t parts = blocks > 0 && blocks < wanted ? ceil_div(wanted, blocks) : 1;
    const int64_t height = std::max<int64_t>(16 * ROWS, ceil_div(ceil_div(rows, parts), ROWS) * ROWS);
    const int64_t heights = ceil_div(rows, height);
    const int64_t part = std::max<int64_t>(1, part_depth(depth));
    common::parallel_for(threads, blocks * heights, [=](int64_t item) {
        const int64_t column = item / heights * width, row = item % heights * height;
        const int64_t num_columns = std::min(width, columns - column), num_rows = std::min(height, rows - row);
        float *panels = common::scratch<0>(part * width), *to = c + row * ld_c + column;
        if (depth <= 0 && !add)
            for (int64_t i = 0; i < num_rows; ++i) std::fill(to + i * ld_c, to + i * ld_c + num_columns, 0.0f);
        for (int64_t k = 0; k < depth; k += part) {
            const int64_t some = std::min(part, depth - k);
            if (transposed) tiles::pack_transposed(b + column * ld_b + k, ld_b, some, num_columns, panels);
            else pack_rows(b + k * ld_b + column, ld_b, some, num_columns, panels);
            const float* from = a + row * ld_a + k;
            multiply(add || k > 0, num_rows, num_columns, some, from, ld_a, panels, to, ld_c);
        }
    });
}

// from [rows, columns] times `scale` -> to [columns, rows], rows of `to` being `ld_to` apart.
void transpose(int threads, int64_t rows, int64_t columns, float scale, const float* from, int64_t ld, float* to,
               int64_t ld_to) {
    common::parallel_for(threads, ceil_div(columns, LANES), [=](int64_t item) {
        const int64_t column = item * LANES, width = std::min<int64_t>(LANES, columns - column);
        for (int64_t row = 0; row < rows; row += LANES) {
            const int64_t high = std::min<int64_t>(LANES, rows - row);
            Float square[LANES];
            for (int64_t i = 0; i < LANES; ++i)
                square[i] = i < high ? scale * simd::load_up_to(from + (row + i) * ld + column, width) : Float{};
            simd::transpose(square);
            for (int64_t i = 0; i < width; ++i) simd::store_up_to(to + (column + i) * ld_to + row, square[i], high);
        }
    });
}

}  // namespace

// c [rows, columns] = a [rows, depth] * b, where b is [depth, columns] or, `transposed`, kept as [columns, depth].
// c must not overlap a or b.
EXPORT void engine_product(int threads, int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t ld_a,
                           const float* b, int64_t ld_b, int transposed, float* c, int64_t ld_c) {
    product(threads, false, rows, columns, depth, a, ld_a, b, ld_b, transposed, c, ld_c);
}
REPLAYED(engine_product)

// c [rows, columns] += scale * a^T b, where a is [depth, rows] and b [depth, columns]: a weight's gradient.
EXPORT void engine_add_product(int threads, int64_t rows, int64_t columns, int64_t depth, float scale, const float* a,
                               int64_t ld_a, const float* b, int64_t ld_b, float* c, int64_t ld_c) {
    // a tile reads some rows of the left operand for many steps of k: those of a^T would each be in a page of its own
    const int64_t ld = ceil_div(depth, LANES) * LANES + LANES;
    const std::unique_ptr<float[]> turned(new float[(size_t)(std::min(rows, TURNED) * ld)]);
    for (int64_t row = 0; row < rows; row += TURNED) {
        const int64_t some = std::min(TURNED, rows - row);
        transpose(threads, depth, some, scale, a + row, ld_a, turned.get(), ld);
        product(threads, true, some, columns, depth, turned.get(), ld, b, ld_b, false, c + row * ld_c, ld_c);
    }
}
