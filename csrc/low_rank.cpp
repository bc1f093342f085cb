// The skinny products of an adapter: H = drop(x) A^T, dA, dB and the rank-r update of the input's gradient.
//
// Each walks its wide operand by rows, once; in bfloat16 by pairs of numbers where the processor multiplies these
// (pairs.h). drop(x) = scale * mask * x; masks are packed bits (philox.cpp) or null.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "common.h"
#include "pairs.h"
#include "rank_sums.h"
#include "simd.h"
#include "skinny.h"

namespace {

using common::ceil_div;
using rank_sums::Section;
using simd::Bf16;
using simd::Float;
using simd::LANES;

constexpr int64_t ROWS = 8;          // rows of an item in products that give a row for a row
constexpr int64_t UPDATE_ROWS = 32;  // the same of the update
constexpr int64_t DEPTH = 128;       // products added up in registers before they join the sum
constexpr int64_t PART_ROWS = 2048;  // rows of one part of dA and dB; parts are added in order

// H[t, r] = scale * sum over i of mask * x[t, i] * packed[i, r], for rows [first, first + rows).
template <class T>
void project_rows(int64_t rows, int64_t inputs, int64_t width, const T* x, int64_t ld_x, const uint8_t* bits,
                  int64_t ld_bits, const float* packed, float* sums) {
    constexpr bool WIDE = std::is_same<T, float>::value;
    std::fill(sums, sums + rows * width, 0.0f);
    float* kept = common::scratch<1>(ROWS * DEPTH);
    for (int64_t first = 0; first < inputs; first += DEPTH) {
        const int64_t depth = std::min(DEPTH, inputs - first);
        for (int64_t i = 0; (bits || !WIDE) && i < rows; ++i)
            for (int64_t k = 0; k < depth; k += LANES) {
                const Float value = simd::load_up_to(x + i * ld_x + first + k, depth - k);
                simd::store(kept + i * DEPTH + k,
                            bits ? simd::keep_lanes(value, bits + i * ld_bits, first + k) : value);
            }
        skinny::Left left = {kept, DEPTH, 1};
        if constexpr (WIDE)
            if (!bits) left = {x + first, ld_x, 1};
        const skinny::Right<float> right = {packed + first * width, width, nullptr, 0, false};
        skinny::product_tiles<false>(left, right, rows, width, depth, [=](int64_t i, int64_t j, int64_t, Float sum) {
            float* to = sums + i * width + j;
            simd::store(to, simd::load(to) + sum);
        });
    }
}

// Wide blocks read a row in long runs; the sums of a block must stay in the cache.
int64_t block_columns(int64_t ranks) { return ranks <= 32 ? 512 : ranks <= 96 ? 256 : 128; }

// x of an adapter: `data`, times a factor for each row and each column where these are given, as a norm's.
template <class T>
struct Input {
    const T* data;
    int64_t ld, inputs;
    const float *row_scale, *column_scale;
};

#if HAS_PAIRS

// The same product by pairs of numbers.
void project_pairs(int threads, int64_t tokens, int64_t inputs, int64_t ranks, const Bf16* x, int64_t ld_x,
                   const uint8_t* bits, int64_t ld_bits, const Bf16* a, int64_t ld_a, float scale, Bf16* h,
                   int64_t ld_h) {
    constexpr int64_t PAIR_ROWS = 32, PAIR_DEPTH = 256;
    const int64_t width = pairs::padded(ranks, LANES), even = inputs - inputs % 2;
    std::vector<uint32_t> memory((size_t)(pairs::padded(inputs) / 2 * width) + LANES);
    uint32_t* packed = (uint32_t*)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
    common::parallel_for(threads, ceil_div(inputs, PAIR_DEPTH), [=](int64_t item) {
        const int64_t first = item * PAIR_DEPTH;
        pairs::interleave_transposed(ranks, std::min(PAIR_DEPTH, inputs - first), a + first, ld_a,
                                     packed + first / 2 * width, width);
    });
    common::parallel_for(threads, ceil_div(tokens, PAIR_ROWS), [=](int64_t item) {
        const int64_t row = item * PAIR_ROWS, rows = std::min(PAIR_ROWS, tokens - row);
        float* sums = common::scratch<0>(PAIR_ROWS * width);
        Bf16* copy = (Bf16*)common::scratch<1>(PAIR_ROWS * PAIR_DEPTH / 2);
        std::fill(sums, sums + rows * width, 0.0f);
        for (int64_t first = 0; first < inputs; first += PAIR_DEPTH) {
            const int64_t depth = std::min(PAIR_DEPTH, inputs - first);
            const Bf16* left = x + row * ld_x + first;
            const bool copies = bits || first + depth > even;
            const int64_t next = first + PAIR_DEPTH < inputs ? PAIR_DEPTH : PAIR_ROWS * ld_x - first;
            for (int64_t i = 0; i < rows; ++i) {
                for (int64_t k = 0; k < PAIR_DEPTH; k += pairs::STEP) pairs::fetch(left + i * ld_x + k + next);
                if (bits) pairs::fetch(bits + (row + rows + i) * ld_bits + first / 8);
            }
            if (copies)
                pairs::copy_rows(rows, depth, left, ld_x, bits ? bits + row * ld_bits + first / 8 : nullptr, ld_bits,
                                 copy, PAIR_DEPTH);
            pairs::add_product(rows, width, depth + depth % 2, copies ? copy : left, copies ? PAIR_DEPTH : ld_x,
                                 packed + first / 2 * width, width, sums, width);
        }
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t r = 0; r < ranks; r += LANES)
                pairs::put_up_to(h + (row + i) * ld_h + r, scale * simd::load(sums + i * width + r), ranks - r);
    });
}

#endif

template <class T>
void project(int threads, int64_t tokens, int64_t inputs, int64_t ranks, const T* x, int64_t ld_x, const uint8_t* bits,
             int64_t ld_bits, const T* a, int64_t ld_a, float scale, T* h, int64_t ld_h) {
    if (tokens <= 0 || ranks <= 0) return;
#if HAS_PAIRS
    if constexpr (std::is_same<T, Bf16>::value)
        if (pairs::found()) {
            project_pairs(threads, tokens, inputs, ranks, x, ld_x, bits, ld_bits, a, ld_a, scale, h, ld_h);
            return;
        }
#endif
    const int64_t width = ceil_div(ranks, LANES) * LANES;
    std::vector<float> memory((size_t)(inputs * width) + 16, 0.0f);
    float* packed = (float*)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
    common::parallel_for(threads, ceil_div(inputs, DEPTH), [=](int64_t item) {
        const int64_t end = std::min(inputs, (item + 1) * DEPTH);
        for (int64_t r = 0; r < ranks; ++r)
            for (int64_t i = item * DEPTH; i < end; ++i) packed[i * width + r] = simd::to_float(a[r * ld_a + i]);
    });
    common::parallel_for(threads, ceil_div(tokens, ROWS), [=](int64_t item) {
        const int64_t first = item * ROWS, rows = std::min(ROWS, tokens - first);
        float* sums = common::scratch<0>(ROWS * width);
        project_rows(rows, inputs, width, x + first * ld_x, ld_x, bits ? bits + first * ld_bits : nullptr, ld_bits,
                     packed, sums);
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t r = 0; r < ranks; ++r)
                simd::store_one(h + (first + i) * ld_h + r, scale * sums[i * width + r]);
    });
}

// A task: columns [first_column, + columns) of one section's gradient, and the rows of one part.
struct Task {
    const Section* section;
    int64_t first_column, columns, part;
};

// Sums tasks part by part, then adds the parts of an element in order.
template <class Sum, class Add>
void run_tasks(int threads, const std::vector<Task>& tasks, int64_t parts, Sum sum, Add add) {
    std::vector<int64_t> offsets(tasks.size() + 1, 0);
    for (size_t i = 0; i < tasks.size(); ++i)
        offsets[i + 1] = offsets[i] + tasks[i].section->num_ranks * ceil_div(tasks[i].columns, LANES) * LANES;
    if (parts == 1) {
        common::parallel_for(threads, (int64_t)tasks.size(), [&](int64_t i) {
            float* block = common::scratch<0>(offsets[i + 1] - offsets[i]);
            std::fill(block, block + offsets[i + 1] - offsets[i], 0.0f);
            sum(tasks[i], block);
            add(tasks[i], block);
        });
        return;
    }
    std::vector<float> blocks((size_t)offsets.back(), 0.0f);
    common::parallel_for(threads, (int64_t)tasks.size(), [&](int64_t i) { sum(tasks[i], blocks.data() + offsets[i]); });
    // tasks of one block of columns follow each other
    common::parallel_for(threads, (int64_t)tasks.size() / parts, [&](int64_t i) {
        float* total = blocks.data() + offsets[i * parts];
        const int64_t size = offsets[i * parts + 1] - offsets[i * parts];
        for (int64_t part = 1; part < parts; ++part)
            for (int64_t k = 0; k < size; ++k) total[k] += total[part * size + k];
        add(tasks[i * parts], total);
    });
}

std::vector<Task> make_tasks(int64_t num_sections, const Section* sections, int64_t parts, int64_t width) {
    std::vector<Task> tasks;
    for (int64_t s = 0; s < num_sections; ++s)
        for (int64_t column = 0; column < sections[s].num_columns; column += width)
            for (int64_t part = 0; part < parts; ++part)
                tasks.push_back({sections + s, sections[s].first_column + column,
                                 std::min(width, sections[s].num_columns - column), part});
    return tasks;
}

template <class T>
void accumulate_a(int threads, int64_t tokens, int64_t ranks, const T* dh, int64_t ld_dh, const Input<T>& x,
                  const uint8_t* bits, int64_t ld_bits, int64_t num_sections, const Section* sections) {
    if (tokens <= 0 || ranks <= 0) return;
    const Section whole = {0, ranks, 0, x.inputs, nullptr, 0, 1.0};
    const int64_t parts = ceil_div(tokens, PART_ROWS);
    const std::vector<Task> tasks = make_tasks(1, &whole, parts, block_columns(ranks));
    const rank_sums::Factor<T> left(threads, tokens, ranks, dh, ld_dh, x.row_scale);
    run_tasks(
        threads, tasks, parts,
        [=, &left](const Task& task, float* block) {
            const int64_t first = task.part * PART_ROWS, last = std::min(tokens, first + PART_ROWS);
            const int64_t column = task.first_column, ld = ceil_div(task.columns, LANES) * LANES;
            const uint8_t* some = bits ? bits + column / 8 : nullptr;
            left.add(first, last - first, 0, ranks, task.columns, x.data + first * x.ld + column, x.ld,
                     some ? some + first * ld_bits : nullptr, ld_bits, true, block, ld);
        },
        [=](const Task& task, const float* block) {
            const int64_t ld = ceil_div(task.columns, LANES) * LANES;
            for (int64_t s = 0; s < num_sections; ++s)
                for (int64_t r = 0; r < sections[s].num_ranks; ++r) {
                    const float* from = block + (sections[s].first_rank + r) * ld;
                    float* to = sections[s].gradient + r * sections[s].ld_gradient + task.first_column;
                    const float scale = (float)sections[s].scale;
                    const float* column_scale = x.column_scale ? x.column_scale + task.first_column : nullptr;
                    for (int64_t c = 0; c < task.columns; ++c)
                        to[c] += scale * from[c] * (column_scale ? column_scale[c] : 1.0f);
                }
        });
}

template <class T>
void accumulate_b(int threads, int64_t tokens, const T* dy, int64_t ld_dy, const T* h, int64_t ld_h,
                  int64_t num_sections, const Section* sections) {
    if (tokens <= 0) return;
    int64_t ranks = 0, last_rank = 0;
    for (int64_t s = 0; s < num_sections; ++s) {
        ranks = std::max(ranks, sections[s].num_ranks);
        last_rank = std::max(last_rank, sections[s].first_rank + sections[s].num_ranks);
    }
    const int64_t parts = ceil_div(tokens, PART_ROWS);
    const std::vector<Task> tasks = make_tasks(num_sections, sections, parts, block_columns(ranks));
    const rank_sums::Factor<T> left(threads, tokens, last_rank, h, ld_h);
    run_tasks(
        threads, tasks, parts,
        [=, &left](const Task& task, float* block) {
            const int64_t first = task.part * PART_ROWS, last = std::min(tokens, first + PART_ROWS);
            left.add(first, last - first, task.section->first_rank, task.section->num_ranks, task.columns,
                     dy + first * ld_dy + task.first_column, ld_dy, nullptr, 0, true, block,
                     ceil_div(task.columns, LANES) * LANES);
        },
        [=](const Task& task, const float* block) {
            const Section& section = *task.section;
            const int64_t ld = ceil_div(task.columns, LANES) * LANES;
            const float scale = (float)section.scale;
            float* to = section.gradient + (task.first_column - section.first_column) * section.ld_gradient;
            for (int64_t c = 0; c < task.columns; ++c)
                for (int64_t r = 0; r < section.num_ranks; ++r)
                    to[c * section.ld_gradient + r] += scale * block[r * ld + c];
        });
}

}  // namespace

// has: 1 where products of bfloat16 numbers are made of pairs of them (pairs.h).
EXPORT void engine_has_pairs(int* has) {
#if HAS_PAIRS
    *has = pairs::found();
#else
    *has = 0;
#endif
}

// h = scale * (mask * x) a^T; a: [ranks, inputs].
EXPORT void engine_project(int threads, int type, int64_t tokens, int64_t inputs, int64_t ranks, const void* x,
                           int64_t ld_x, const uint8_t* bits, int64_t ld_bits, const void* a, int64_t ld_a, float scale,
                           void* h, int64_t ld_h) {
    simd::with_type(type, [=](auto zero) {
        using T = decltype(zero);
        project(threads, tokens, inputs, ranks, (const T*)x, ld_x, bits, ld_bits, (const T*)a, ld_a, scale, (T*)h,
                ld_h);
    });
}
REPLAYED(engine_project)

// dx = dy + scale * mask * (dh a); dx may be dy.
EXPORT void engine_add_input_gradient(int threads, int type, int64_t tokens, int64_t inputs, const void* dy,
                                      int64_t ld_dy, int64_t rank, const void* dh, int64_t ld_dh, const void* a,
                                      int64_t ld_a, const uint8_t* bits, int64_t ld_bits, float scale, void* dx,
                                      int64_t ld_dx) {
    simd::with_type(type, [=](auto zero) {
        using T = decltype(zero);
        const skinny::Update<T> update(threads, inputs, rank, (const T*)dh, ld_dh, (const T*)a, ld_a, bits, ld_bits,
                                       scale);
        common::parallel_for(threads, ceil_div(tokens, UPDATE_ROWS), [=, &update](int64_t item) {
            const int64_t first = item * UPDATE_ROWS;
            update.add((const T*)dy + first * ld_dy, ld_dy, first, std::min(UPDATE_ROWS, tokens - first), 0, inputs,
                       (T*)dx + first * ld_dx, ld_dx);
        });
    });
}

// For each section: fp32 gradient [num_ranks, inputs] += section scale * dh[:, ranks]^T (mask * x), where x
// [tokens, inputs] is times row_scale [tokens] and column_scale [inputs] (fp32, or null for 1).
EXPORT void engine_accumulate_a(int threads, int type, int64_t tokens, int64_t inputs, int64_t ranks, const void* dh,
                                int64_t ld_dh, const void* x, int64_t ld_x, const float* row_scale,
                                const float* column_scale, const uint8_t* bits, int64_t ld_bits, int64_t num_sections,
                                const Section* sections) {
    simd::with_type(type, [=](auto zero) {
        using T = decltype(zero);
        const Input<T> input = {(const T*)x, ld_x, inputs, row_scale, column_scale};
        accumulate_a(threads, tokens, ranks, (const T*)dh, ld_dh, input, bits, ld_bits, num_sections, sections);
    });
}

// For each section: fp32 gradient [num_columns, num_ranks] += section scale * dy[:, columns]^T h[:, ranks].
EXPORT void engine_accumulate_b(int threads, int type, int64_t tokens, const void* dy, int64_t ld_dy, const void* h,
                                int64_t ld_h, int64_t num_sections, const Section* sections) {
    simd::with_type(type, [=](auto zero) {
        using T = decltype(zero);
        accumulate_b(threads, tokens, (const T*)dy, ld_dy, (const T*)h, ld_h, num_sections, sections);
    });
}
