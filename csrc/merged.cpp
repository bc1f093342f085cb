// A weight in a vendor's format with a low-rank update added, W + s B A, rounded to the codes of its format again: what
// a merged checkpoint will hold, decoded or in the place of the weight's own codes. Bits are those of merged_decode and
// merge in engine/kernels/reference_formats.py.
//
// A strip of rows at a time, whose old and new numbers stay in the cache. A number's products are added one after
// another, each rounded before it is added and after; a block of numbers that share a scale is then rounded as a whole.
#include <cfloat>

#include "formats.h"
#include "merged_outputs.h"

namespace formats {

namespace {

constexpr int64_t STRIP = 4;  // rows, where fewer share a scale
#if SIMD_AVX512
constexpr int VECTORS = 4;  // 4 x 4 sums, 4 operands, a number of B and a product: 22 of 32 registers
#else
constexpr int VECTORS = 2;  // 4 x 2 sums, 2 operands, a number of B and a product: 12 of 16 registers
#endif
constexpr int64_t ITEM = 16;     // rows of an item of work, where fewer share a scale
constexpr int64_t WIDTH = 1024;  // columns at a time; half of them where rows share scales; a wider group is whole
constexpr float SMALLEST = 1e-30f;

// The factors in fp32: B [rows, rank] without gaps, A [rank, ld_a].
struct Factors {
    int64_t rank;
    const float* b;
    const float* a;
    int64_t ld_a;
    float scale;
};

int64_t padded(int64_t columns) { return common::ceil_div(columns, LANES) * LANES; }

// A distance between rows that is an odd number of lines, so that a column's numbers lie in different cache sets.
int64_t odd_lines(int64_t columns) { return (common::ceil_div(columns, 16) | 1) * 16; }

// sums [HIGH rows, WIDE vectors] = old + scale * sum over k of b[i, k] a[k, c].
template <int HIGH, int WIDE>
SIMD_INLINE void add_tile(const Factors& of, const float* b, const float* a, const float* old, float* sums,
                          int64_t ld) {
    Float sum[HIGH][WIDE] = {};
    for (int64_t k = 0; k < of.rank; ++k, a += of.ld_a) {
        Float right[WIDE];
#pragma GCC unroll 8
        for (int v = 0; v < WIDE; ++v) right[v] = simd::load(a + v * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < HIGH; ++i)
#pragma GCC unroll 8
            for (int v = 0; v < WIDE; ++v) sum[i][v] += simd::rounded(right[v] * b[i * of.rank + k]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < HIGH; ++i)
#pragma GCC unroll 8
        for (int v = 0; v < WIDE; ++v)
            simd::store(sums + i * ld + v * LANES,
                        simd::load(old + i * ld + v * LANES) + simd::rounded(sum[i][v] * of.scale));
}

template <int HIGH>
void add_rows(const Factors& of, const float* b, const float* a, const float* old, float* sums, int64_t ld,
              int64_t columns) {
    int64_t c = 0;
    for (; c + (VECTORS - 1) * LANES < columns; c += VECTORS * LANES)
        add_tile<HIGH, VECTORS>(of, b, a + c, old + c, sums + c, ld);
    for (; c < columns; c += LANES) add_tile<HIGH, 1>(of, b, a + c, old + c, sums + c, ld);
}

// sums [rows, columns] = old + scale * B A of the rows from `row` and the columns from `column` on; both `ld` apart.
void add_product(const Factors& of, int64_t row, int64_t column, const float* old, float* sums, int64_t ld,
                 int64_t rows, int64_t columns) {
    const float *b = of.b + row * of.rank, *a = of.a + column;
    int64_t i = 0;
    for (; i + STRIP <= rows; i += STRIP)
        add_rows<STRIP>(of, b + i * of.rank, a, old + i * ld, sums + i * ld, ld, columns);
    for (; i < rows; ++i) add_rows<1>(of, b + i * of.rank, a, old + i * ld, sums + i * ld, ld, columns);
}

SIMD_INLINE Float absolute(Float value) { return (Float)((Int)value & 0x7FFFFFFF); }

SIMD_INLINE bool in_all_lanes(Int condition) {
#if SIMD_AVX512
    return _mm512_movepi32_mask((__m512i)condition) == 0xFFFF;
#elif SIMD_AVX2
    return _mm256_movemask_ps((__m256)condition) == 0xFF;
#else
    bool all = true;
    for (int i = 0; i < LANES; ++i) all = all && condition[i];
    return all;
#endif
}

// To multiples of 2^(exponent - MANTISSA), where 2^exponent is the power of 2 that is not above the number, but at
// least 2^SMALLEST_EXPONENT; halves to the even one. Adding 1.5 * 2^23 steps leaves multiples of them. value >= 0; it
// is moved by `shift` steps first.
template <class Number, int MANTISSA, int SMALLEST_EXPONENT>
SIMD_INLINE Number to_grid(Number value, Number shift = Number{}) {
    typedef typename std::conditional<std::is_same<Number, Float>::value, Int, int32_t>::type Bits;
    Bits exponent;
    memcpy(&exponent, &value, sizeof exponent);
    exponent &= 0x7F800000;
    constexpr int32_t LEAST = (127 + SMALLEST_EXPONENT) << 23;
    exponent = exponent < LEAST ? LEAST + Bits{} : exponent;
    const Bits step_bits = exponent - (MANTISSA << 23), coarse_bits = (exponent + ((23 - MANTISSA) << 23)) | 0x400000;
    Number step, coarse;
    memcpy(&step, &step_bits, sizeof step);
    memcpy(&coarse, &coarse_bits, sizeof coarse);
    return (value + shift * step + coarse) - coarse;  // shift * step is exact
}

SIMD_INLINE Float to_whole(Float value) {
#if SIMD_AVX512
    return (Float)_mm512_maskz_roundscale_ps((__mmask16)0xFFFF, (__m512)value, 8);  // nearest, halves to even
#elif SIMD_AVX2
    return (Float)_mm256_round_ps((__m256)value, 8);
#else
    for (int i = 0; i < LANES; ++i) value[i] = std::nearbyint(value[i]);
    return value;
#endif
}

SIMD_INLINE Float clamped(Float value, float lowest, float highest) {  // NaN stays NaN
    value = value < lowest ? simd::splat(lowest) : value;
    return value > highest ? simd::splat(highest) : value;
}

// How far numbers of a block that keeps its scale are moved before they are rounded, in steps: less than half of one,
// spread evenly by the old numbers, their scale, and their places in the block, the first of which is `place`.
SIMD_INLINE Float spread(Float old, float scale, int64_t place) {
    simd::Word lane;
    for (int i = 0; i < LANES; ++i) lane[i] = (uint32_t)i;
    simd::Word key = (simd::Word)(absolute(old) + scale) * 0x9E3779B1u;
    key = ((key ^ (key >> 16)) * 0x85EBCA77u >> 20) + (lane + (uint32_t)place) * 2531u;
    key &= 4095u;
    return (4095.0f - 2.0f * __builtin_convertvector((Int)key, Float)) * 0x1p-13f;
}

// The value, under a scale of 1, of the code nearest to number / scale once this is moved by `shift` steps: outwards,
// of integers upwards.
template <int CODES>
SIMD_INLINE Float nearest(Float quotient, int zero, Float shift = Float{}) {
    if (CODES == INT4 || CODES == INT8) {
        const float lowest = CODES == INT4 ? (float)-zero : -128, highest = CODES == INT4 ? (float)(15 - zero) : 127;
        return clamped(to_whole(quotient + shift), lowest, highest) + 0.0f;  // integers have no -0
    }
    constexpr float largest = CODES == E2M1 ? 6.0f : 448.0f;
    const Float size = clamped(absolute(quotient), 0.0f, largest);
    const Float value = CODES == E2M1 ? to_grid<Float, 1, 0>(size, shift) : to_grid<Float, 3, -6>(size, shift);
    return (Float)((Int)value | ((Int)quotient & INT32_MIN));
}

// Bounds of number / scale within which a block keeps its scale: the grid's, and half a step beyond its ends.
struct Reach {
    float lowest, highest;

    template <int CODES>
    static Reach of(int zero) {
        if (CODES == INT4) return {-0.5f - zero, 15.5f - zero};
        if (CODES == INT8) return {-128.5f, 127.5f};
        const float bound = CODES == E2M1 ? 7.0f : 464.0f;
        return {-bound, bound};
    }
};

float bits_to_float(int32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

int32_t float_to_bits(float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

// A power of 2 by its exponent, which is held to those that can be stored.
float power(int32_t exponent) { return exponent_value((uint8_t)std::min(std::max(exponent, 0), 254)); }

// A scale as it is stored: to the nearest of its dtype, whose epsilon stands for 0.
float stored_scale(int scale_type, float scale) {
    float stored = scale, epsilon = 0x1p-23f;
    if (scale_type == BRAIN) {
        Bf16 half;
        simd::store_one(&half, scale);
        stored = simd::to_float(half), epsilon = 0x1p-7f;
    } else if (scale_type == HALF) {
        stored = scale < 65520.0f ? to_grid<float, 10, -14>(scale) : INFINITY, epsilon = 0x1p-10f;
    }
    return stored == 0 ? epsilon : stored;
}

Choice alone(float scale, int zero = INT4_ZERO) { return {scale, zero, scale}; }

Choice of_tensor(float stored, float whole, bool over) {
    return {over ? stored / whole : stored * whole, INT4_ZERO, stored};
}

// The scale of a block by its largest magnitude, which is finite; `whole` is the tensor's scale.
template <int CODES>
Choice fresh_scale(int scale_type, float largest, float whole) {
    constexpr float code = CODES == E2M1 ? 6.0f : CODES == INT4 ? 7.5f : CODES == INT8 ? 127.0f : 448.0f;
    if (scale_type == OVER_TENSOR) {
        const float scale = std::min(largest / code * whole, 448.0f);
        const float stored = to_grid<float, 3, -6>(scale);
        return of_tensor(stored == 0 ? 0.125f : stored, whole, true);
    }
    if (scale_type == TIMES_TENSOR) {
        const float scale = largest == 0 ? 1.0f : largest / (whole * code);
        return of_tensor(to_grid<float, 3, -6>(std::min(std::max(scale, 0x1p-9f), 448.0f)), whole, false);
    }
    if (scale_type == EXPONENT)  // one more from 1.75 of a power of 2 on
        return alone(power(((float_to_bits(largest) + (1 << 21)) >> 23) - (CODES == E2M1 ? 2 : 8)));
    const float scale = (CODES == INT8 ? (largest < SMALLEST ? SMALLEST : largest) : largest) / code;
    if (scale_type == EXPONENT_ABOVE) return alone(power((float_to_bits(scale) + 0x7FFFFF) >> 23));
    return alone(stored_scale(scale_type, scale));
}

// A block of numbers that share a scale, rows `ld` apart: old ones, and new ones that get codes.
struct Block {
    int64_t rows, columns;
    const float *old, *sums;
    int64_t ld;

    // The largest of the keys of the numbers' bits, and 0; magnitudes' bits sort as the numbers do, NaN last.
    template <class Key>
    float largest(Key key) const {
        Int most = {};
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t c = 0; c < columns; c += LANES) {
                const Int bits = key((Int)simd::load_up_to(sums + i * ld + c, columns - c));
                most = bits > most ? bits : most;
            }
        int32_t found = 0;
        for (int lane = 0; lane < LANES; ++lane) found = std::max(found, (int32_t)most[lane]);
        return bits_to_float(found);
    }
};

// The scale, and the zero point, of a block that does not keep its own.
template <int CODES>
Choice fresh(const Matrix& of, int64_t row, const Block& block) {
    const float largest = block.largest([](Int bits) { return bits & 0x7FFFFFFF; });
    if (!(largest < INFINITY)) return alone(NAN, 0);
    if (CODES != INT4 || !of.zeros)
        return fresh_scale<CODES>(of.scale_type, largest, of.tensor_scale ? of.tensor_scale[row] : 1.0f);
    const float highest = block.largest([](Int bits) { return bits; });
    const float below = block.largest([](Int bits) { return bits < 0 ? bits & 0x7FFFFFFF : 0 * bits; });
    const float span = (highest + below) / 15.0f;
    if (!(span < INFINITY)) return alone(NAN, 0);
    const float zero = span > 0 ? below / span : 0.0f;
    return alone(stored_scale(of.scale_type, span), zero < INFINITY ? (int)std::nearbyint(std::min(zero, 15.0f)) : 0);
}

// Numbers / scale go to `quotients` [rows, padded columns]. Says whether each has a code under its scale, or is the old
// number; or, where scales are kept, is finite. scales: one a row.
bool divide(const Block& block, const float* scales, Reach reach, bool keeps_scales, float* quotients) {
    if (keeps_scales) reach = {-FLT_MAX, FLT_MAX};
    const int64_t ld = padded(block.columns);
    Int fits = {};
    fits = ~fits;
    for (int64_t i = 0; i < block.rows; ++i)
        for (int64_t c = 0; c < block.columns; c += LANES) {
            const Float sum = simd::load_up_to(block.sums + i * block.ld + c, block.columns - c);
            const Float old = simd::load_up_to(block.old + i * block.ld + c, block.columns - c);
            const Float quotient = sum / scales[i];
            simd::store(quotients + i * ld + c, quotient);
            const Float tested = keeps_scales ? sum : quotient;
            fits &= (sum == old) | ((tested >= reach.lowest) & (tested <= reach.highest));
        }
    return in_all_lanes(fits);
}

// Gives the block at this row and column, which does not keep its scale, a new one, and its numbers codes.
template <int CODES, class Out>
void round_changed(const Matrix& of, int64_t row, int64_t column, const Block& block, const Out& out) {
    const Choice choice = fresh<CODES>(of, row, block);
    out.rescale(of, row, block.rows, column / of.group, choice);
    for (int64_t i = 0; i < block.rows; ++i)
        for (int64_t c = 0; c < block.columns; c += LANES) {
            const int64_t count = std::min<int64_t>(LANES, block.columns - c);
            const Float quotient = simd::load_up_to(block.sums + i * block.ld + c, count) / choice.scale;
            out.put(row + i, column + c, count, nearest<CODES>(quotient, choice.zero), choice.scale, choice.zero);
        }
}

// Gives the numbers of the block at this row and column their codes. scales: one a row.
template <int CODES, class Out>
void round_block(const Matrix& of, int64_t row, int64_t column, const Block& block, const float* scales, int zero,
                 float* quotients, const Out& out) {
    if (!divide(block, scales, Reach::of<CODES>(zero), of.keeps_scales, quotients)) {
        round_changed<CODES>(of, row, column, block, out);
        return;
    }
    const int64_t ld = padded(block.columns);
    for (int64_t i = 0; i < block.rows; ++i)
        for (int64_t c = 0; c < block.columns; c += LANES) {
            const int64_t count = std::min<int64_t>(LANES, block.columns - c);
            const Float sum = simd::load_up_to(block.sums + i * block.ld + c, count);
            const Float old = simd::load_up_to(block.old + i * block.ld + c, count);
            const Float shift = spread(old, scales[i], c);
            const Float value = nearest<CODES>(simd::load(quotients + i * ld + c), zero, shift);
            out.keep(row + i, column + c, count, value, scales[i], zero, sum == old, old);
        }
}

// As round_block, of a block of one row of N vectors: the numbers are written as if it kept its scale. Says whether it
// does.
template <int CODES, int N, class Out>
SIMD_INLINE bool round_vectors(int64_t row, int64_t column, const float* old, const float* sums, float scale, int zero,
                               const Out& out) {
    const Reach reach = Reach::of<CODES>(zero);
    Float quotient[N];
    Int fits = {};
    fits = ~fits;
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) {
        const Float sum = simd::load(sums + v * LANES);
        quotient[v] = sum / scale;
        fits &= (sum == simd::load(old + v * LANES)) | ((quotient[v] >= reach.lowest) & (quotient[v] <= reach.highest));
    }
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) {
        const Float before = simd::load(old + v * LANES);
        const Float value = nearest<CODES>(quotient[v], zero, spread(before, scale, v * LANES));
        out.keep(row, column + v * LANES, LANES, value, scale, zero, simd::load(sums + v * LANES) == before, before);
    }
    return in_all_lanes(fits);
}

template <int CODES, class Out>
class Merged {
public:
    Merged(const Matrix& of, const Factors& factors, const Out& out)
        : of_(of), factors_(factors), out_(out), groups_(of.groups()) {
        const bool whole = of.group >= of.columns;
        strip_ = of.joint > 1 ? of.joint : STRIP;
        item_ = of.joint > 1 ? of.joint : whole ? STRIP : ITEM;
        const int64_t wide = of.joint > 1 ? WIDTH / 2 : WIDTH;
        width_ = whole ? of.columns : std::max(wide / of.group, (int64_t)1) * of.group;
        ld_ = odd_lines(width_);
    }

    int64_t items() const { return common::ceil_div(of_.rows, item_); }

    void run(int64_t item) const {
        const int64_t first = item * item_, last = std::min(of_.rows, first + item_);
        float* scales = common::scratch<0>(common::ceil_div(item_, of_.granule) * groups_);
        for (int64_t row = first; row < last; row += of_.granule)
            row_scales(of_, row, scales + (row - first) / of_.granule * groups_);
        for (int64_t column = 0; column < of_.columns; column += width_)
            for (int64_t row = first; row < last; row += strip_)
                strip(row, std::min(strip_, last - row), column, scales + (row - first) / of_.granule * groups_);
    }

private:
    // rows from `row` and columns from `column` on; scales are those of the strip.
    void strip(int64_t row, int64_t rows, int64_t column, const float* scales) const {
        const int64_t columns = std::min(width_, of_.columns - column), first_group = column / of_.group;
        float *old = common::scratch<1>(strip_ * ld_), *sums = common::scratch<2>(strip_ * ld_);
        for (int64_t i = 0; i < rows; ++i)
            decode_row<CODES>(of_, row + i, scales + i / of_.granule * groups_, first_group, columns, old + i * ld_);
        add_product(factors_, row, column, old, sums, ld_, rows, columns);
        if (of_.joint == 1 && !of_.keeps_scales && columns % of_.group == 0) {
            if (of_.group == LANES) return round_rows<1>(row, rows, column, columns, old, sums, scales);
            if (of_.group == 2 * LANES) return round_rows<2>(row, rows, column, columns, old, sums, scales);
            if (of_.group == 4 * LANES) return round_rows<4>(row, rows, column, columns, old, sums, scales);
            if (of_.group == 8 * LANES) return round_rows<8>(row, rows, column, columns, old, sums, scales);
        }
        float* quotients = common::scratch<3>(of_.joint * padded(std::min(of_.group, width_)));
        float* of_rows = common::scratch<4>(of_.joint);
        for (int64_t i = 0; i < rows; i += of_.joint)
            for (int64_t c = 0, group = first_group; c < columns; c += of_.group, ++group) {
                const Block block = {std::min(of_.joint, rows - i), std::min(of_.group, columns - c),
                                     old + i * ld_ + c, sums + i * ld_ + c, ld_};
                for (int64_t j = 0; j < block.rows; ++j) of_rows[j] = scales[(i + j) / of_.granule * groups_ + group];
                round_block<CODES>(of_, row + i, column + c, block, of_rows,
                                   CODES == INT4 ? zero_point(of_, row + i, group) : 0, quotients, out_);
            }
    }

    // Blocks of one row of N vectors; first those that keep their scales, so that the loop calls nothing.
    template <int N>
    void round_rows(int64_t row, int64_t rows, int64_t column, int64_t columns, const float* old, const float* sums,
                    const float* scales) const {
        const int64_t first_group = column / of_.group, groups = columns / of_.group;
        int32_t changed[WIDTH / LANES];
        for (int64_t i = 0; i < rows; ++i) {
            const float *scale = scales + i * groups_ + first_group, *before = old + i * ld_, *after = sums + i * ld_;
            int64_t count = 0;
            for (int64_t g = 0; g < groups; ++g) {
                const int64_t c = g * N * LANES;
                const int zero = CODES == INT4 ? zero_point(of_, row + i, first_group + g) : 0;
                changed[count] = (int32_t)g;
                count += !round_vectors<CODES, N>(row + i, column + c, before + c, after + c, scale[g], zero, out_);
            }
            for (int64_t j = 0; j < count; ++j) {
                const int64_t g = changed[j], c = g * N * LANES;
                const Block block = {1, N * LANES, before + c, after + c, ld_};
                round_changed<CODES>(of_, row + i, column + c, block, out_);
            }
        }
    }

    const Matrix of_;
    const Factors factors_;
    const Out out_;
    const int64_t groups_;
    int64_t strip_, item_, width_, ld_;
};

// Where the factors are widened to, and the work on a matrix.
template <class Work>
void with_factors(int type, int64_t rows, int64_t columns, int64_t rank, const void* b, int64_t ld_b, const void* a,
                  int64_t ld_a, float scale, Work work) {
    const int64_t ld = odd_lines(columns + LANES);  // a group may begin inside a vector
    float *wide_a = common::scratch<5>(rank * ld), *wide_b = common::scratch<6>(rows * rank);
    std::fill(wide_a, wide_a + rank * ld, 0.0f);
    simd::with_type(type, [=](auto zero) {
        using T = decltype(zero);
        simd::widen_rows((const T*)b, ld_b, rows, rank, wide_b, rank);
        simd::widen_rows((const T*)a, ld_a, rank, columns, wide_a, ld);
    });
    work(Factors{rank, wide_b, wide_a, ld, scale});
}

template <int CODES, class Out>
void merge_rows(int threads, const Matrix& of, const Factors& factors, const Out& out) {
    const Merged<CODES, Out> merged(of, factors, out);
    common::parallel_for(threads, merged.items(), [&](int64_t item) { merged.run(item); });
}

}  // namespace

}  // namespace formats

// out [rows, columns] of `type`, decoded from the codes of the base + scale * b [rows, rank] a [rank, columns]; b and a
// of factor_type. The rest is as in formats::Matrix.
EXPORT void engine_merged_decode(int threads, int type, int64_t rows, int64_t columns, int code_type,
                                 const uint8_t* codes, int64_t ld_codes, int scale_type, const void* scales,
                                 int64_t ld_scales, int64_t joint, int64_t granule, int64_t group,
                                 const float* tensor_scale, const uint8_t* zeros, int64_t ld_zeros, int keeps_scales,
                                 int factor_type, int64_t rank, const void* b, int64_t ld_b, const void* a,
                                 int64_t ld_a, float scale, void* out, int64_t ld_out) {
    const formats::Matrix of = {rows,  columns, codes, ld_codes,     scale_type, scales,   ld_scales,
                                joint, granule, group, tensor_scale, zeros,      ld_zeros, keeps_scales != 0};
    formats::with_factors(factor_type, rows, columns, rank, b, ld_b, a, ld_a, scale, [&](const auto& factors) {
        simd::with_type(type, [&](auto zero) {
            using T = decltype(zero);
            formats::with_codes(code_type, [&](auto kind) {
                formats::merge_rows<kind()>(threads, of, factors, formats::Numbers<T>{(T*)out, ld_out});
            });
        });
    });
}
REPLAYED(engine_merged_decode)

// The same, with the codes, and the scales and zero points of blocks that get new ones, in place of the base's.
EXPORT void engine_merge_in_place(int threads, int64_t rows, int64_t columns, int code_type, uint8_t* codes,
                                  int64_t ld_codes, int scale_type, void* scales, int64_t ld_scales, int64_t joint,
                                  int64_t granule, int64_t group, const float* tensor_scale, uint8_t* zeros,
                                  int64_t ld_zeros, int keeps_scales, int factor_type, int64_t rank, const void* b,
                                  int64_t ld_b, const void* a, int64_t ld_a, float scale) {
    const formats::Matrix of = {rows,  columns, codes, ld_codes,     scale_type, scales,   ld_scales,
                                joint, granule, group, tensor_scale, zeros,      ld_zeros, keeps_scales != 0};
    formats::with_factors(factor_type, rows, columns, rank, b, ld_b, a, ld_a, scale, [&](const auto& factors) {
        formats::with_codes(code_type, [&](auto kind) {
            const formats::CodeRows<kind()> out = {codes, ld_codes, scales, ld_scales, zeros, ld_zeros};
            formats::merge_rows<kind()>(threads, of, factors, out);
        });
    });
}
