// Backward of SwiGLU beside the gradient of A of the adapters on its output, dA = dH^T drop(y).
//
// y is recomputed from what backward reads anyway, a few rows at a time, and dropped once dA has them: it is neither
// written to memory nor read from there. Tokens go by groups, whose sums are added in order: the result does not depend
// on the threads.
#include <algorithm>

#include "common.h"
#include "rank_sums.h"
#include "simd.h"
#include "skinny.h"
#include "swiglu.h"

namespace {

using common::ceil_div;
using rank_sums::COLUMNS;
using rank_sums::Section;
using simd::LANES;
using swiglu::backward_row;

// Few rows, but of as many columns as their sums stay in the cache for: memory is read and written in long runs, which
// takes a third of the time of blocks of 32 rows and 512 columns (at rank 16).
template <class T>
constexpr int64_t ROWS = 64 / sizeof(T);
constexpr int64_t SUMS = 65536;               // numbers of an item, at most
constexpr int64_t WIDTH = 4 * skinny::PANEL;  // columns of an item are a multiple of it: of whole bytes of bits, too
constexpr int64_t GROUP = 256;                // tokens whose sums are one part of dA
constexpr int64_t HEIGHT = 2048;              // tokens of a pass, the sums of whose groups lie in memory together

// What dA needs besides y: dH, the bits of what dropout keeps of y (or null), and where dA goes.
struct Adapters {
    int64_t ranks;
    const void* dh;
    int64_t ld_dh;
    const uint8_t* bits;
    int64_t ld_bits, num_sections;
    const Section* sections;
};

// Columns of an item: wide, but so that each thread has one. No sum depends on it.
int64_t item_width(int threads, int64_t features, int64_t ranks, int64_t groups) {
    const int64_t most = std::max(WIDTH, SUMS / std::max<int64_t>(ranks, 1));
    const int64_t blocks = std::max(ceil_div(features, most), ceil_div(threads, groups));
    return ceil_div(ceil_div(features, blocks), WIDTH) * WIDTH;
}

// Adds the groups' sums [groups, ranks, ld] of columns [first, last) to the sections' gradients.
void finish(const Adapters& a, int64_t groups, int64_t first, int64_t last, const float* sums, int64_t ld) {
    for (const Section* s = a.sections; s < a.sections + a.num_sections; ++s)
        for (int64_t r = 0; r < s->num_ranks; ++r) {
            const float* from = sums + (s->first_rank + r) * ld + first;
            float* to = s->gradient + r * s->ld_gradient + first;
            rank_sums::add_groups(groups, from, a.ranks * ld, last - first, (float)s->scale, to, 1);
        }
}

template <class T>
void backward(int threads, int64_t tokens, int64_t features, const T* dy, int64_t ld_dy, const T* gate_up,
              int64_t ld_gate_up, const skinny::Update<T>& update, T* d_gate_up, int64_t ld_d_gate_up,
              const Adapters& a) {
    if (tokens <= 0 || features <= 0) return;
    const rank_sums::Factor<T> dh(threads, tokens, a.ranks, (const T*)a.dh, a.ld_dh);
    const int64_t most_groups = ceil_div(std::min(HEIGHT, tokens), GROUP), ld = ceil_div(features, LANES) * LANES;
    const int64_t width = item_width(threads, features, a.ranks, most_groups), blocks = ceil_div(features, width);
    float* sums = common::scratch<8>(most_groups * a.ranks * ld);
    for (int64_t top = 0; top < tokens; top += HEIGHT) {
        const int64_t groups = ceil_div(std::min(HEIGHT, tokens - top), GROUP);
        common::parallel_for(threads, groups * blocks, [=, &a, &dh, &update](int64_t item) {
            const int64_t group = item / blocks, column = item % blocks * width, begin = top + group * GROUP;
            const int64_t columns = std::min(width, features - column);
            float* updated = common::scratch<0>(ROWS<T> * width);
            T* y = (T*)common::scratch<1>(ROWS<T> * width);
            float* to = sums + group * a.ranks * ld + column;
            for (int64_t r = 0; r < a.ranks; ++r) std::fill_n(to + r * ld, columns, 0.0f);
            for (int64_t row = begin; row < std::min(tokens, begin + GROUP); row += ROWS<T>) {
                const int64_t rows = std::min(ROWS<T>, tokens - row);
                const T *grad = dy + row * ld_dy + column, *gate = gate_up + row * ld_gate_up + column;
                T* dgate = d_gate_up + row * ld_d_gate_up + column;
                if (update.wanted()) update.add(grad, ld_dy, row, rows, column, columns, updated, width);
                for (int64_t i = 0; i < rows; ++i, gate += ld_gate_up, dgate += ld_d_gate_up) {
                    const T* up = gate + features;
                    if (update.wanted())
                        backward_row(updated + i * width, gate, up, columns, dgate, dgate + features, y + i * width);
                    else backward_row(grad + i * ld_dy, gate, up, columns, dgate, dgate + features, y + i * width);
                }
                const uint8_t* bits = a.bits ? a.bits + row * a.ld_bits + column / 8 : nullptr;
                if (a.num_sections == 0) continue;
                dh.add(row, rows, 0, a.ranks, columns, y, width, bits, a.ld_bits, false, to, ld);
            }
        });
        common::parallel_for(threads, ceil_div(features, COLUMNS), [=, &a](int64_t item) {
            finish(a, groups, item * COLUMNS, std::min(features, (item + 1) * COLUMNS), sums, ld);
        });
    }
}

}  // namespace

// As engine_swiglu_backward; and each section's fp32 gradient [num_ranks, features] += section scale * dh[:, ranks]^T
// (mask * y). `update`: its rank, which is that of the adapters on y, or 0 where dy has it already.
EXPORT void engine_swiglu_backward_adapted(int threads, int type, int64_t tokens, int64_t features, const void* dy,
                                           int64_t ld_dy, const void* gate_up, int64_t ld_gate_up, int64_t update,
                                           const void* a, int64_t ld_a, float keep_scale, void* d_gate_up,
                                           int64_t ld_d_gate_up, int64_t ranks, const void* dh, int64_t ld_dh,
                                           const uint8_t* bits, int64_t ld_bits, int64_t num_sections,
                                           const Section* sections) {
    simd::with_type(type, [=](auto zero) {
        using T = decltype(zero);
        const skinny::Update<T> added(threads, features, update, (const T*)dh, ld_dh, (const T*)a, ld_a, bits, ld_bits,
                                      keep_scale);
        const Adapters adapters = {ranks, dh, ld_dh, bits, ld_bits, num_sections, sections};
        backward(threads, tokens, features, (const T*)dy, ld_dy, (const T*)gate_up, ld_gate_up, added, (T*)d_gate_up,
                 ld_d_gate_up, adapters);
    });
}
