// A product of few rows with a matrix in a vendor's format, C = A W^T: activations of a few tokens times a frozen weight
// whose codes are read once, and whose numbers are in registers alone. They are those of block_decode in A's type.
//
// An item of work is some rows of W. A tile takes a few of them past some rows of A, as in few_rows.cpp; A is in fp32,
// its rows are whole vectors, and zeros where there are none. Each element is summed along the depth in LANES sums,
// which are then added one after the other: the result depends neither on the threads nor on the other rows and columns.
//
// For bfloat16, as little as possible is rounded: of packed integers the table of a group's sixteen values, of e2m1's,
// which are 1 or 3 times a power of 2, two of them. Rows with a scale that is subnormal, huge or no number, and groups
// of no whole vectors, are decoded to memory.
#include "formats.h"

namespace formats {

namespace {

constexpr int MOST_ROWS = SIMD_LANES == 16 ? 8 : 4;  // of A in a tile
constexpr int64_t ITEM = 48;                         // rows of W; a multiple of every tile's
constexpr int64_t LINE = 64;                         // bytes that are fetched at a time
constexpr float LEAST_SCALE = 0x1p-100f, MOST_SCALE = 0x1p100f;

constexpr bool packed(int codes) { return codes == E2M1 || codes == INT4; }

// Rows of W in a tile of so many of A.
constexpr int tile_columns(int rows) { return LANES < 16 ? 2 : rows <= 4 ? 4 : 3; }

// As T has it, in fp32; no NaN but those of arithmetic.
template <class T>
SIMD_INLINE Float as_stored(Float value) {
    if (std::is_same<T, float>::value) return value;
    const Word bits = (Word)value;
    return (Float)((bits + 0x7FFFu + (bits >> 16 & 1u)) & 0xFFFF0000u);
}

// Of a group; `threes` is three halves of it as T has that, where only such numbers are rounded.
struct Scale {
    float whole, threes;
};

// The numbers of a group, LANES at a time. EXACT: codes times scales have no more bits than T.
template <int CODES, class T, bool EXACT>
struct Group {
    Table table;  // of packed codes
    float scale;  // of others

    SIMD_INLINE void set(Scale of, int zero) {
        scale = of.whole;
        if (CODES == E2M1 && !std::is_same<T, float>::value) {
            constexpr float POWERS[16] = {0, 0.5f, 1, 1, 2, 2, 4, 4, -0.0f, -0.5f, -1, -1, -2, -2, -4, -4};
            constexpr int32_t THREES[16] = {0, 0, 0, -1, 0, -1, 0, -1, 0, 0, 0, -1, 0, -1, 0, -1};
#pragma GCC unroll 4
            for (int i = 0; i < 16 / LANES; ++i) {
                Int threes;
                memcpy(&threes, THREES + i * LANES, sizeof threes);
                const Float size = threes ? simd::splat(of.threes) : simd::splat(of.whole);
                table.part[i] = size * simd::load(POWERS + i * LANES);
            }
        } else if (packed(CODES)) {
            table = Table::of<CODES>(of.whole, zero);
            for (Float& part : table.part) part = as_stored<T>(part);
        }
    }

    SIMD_INLINE Float at(const uint8_t* codes, int64_t count) const {
        if (packed(CODES)) return count >= LANES ? table.at(codes) : table.part_at(codes, count);
        const Float value = from_byte<CODES>(load_bytes(codes, count)) * scale;
        return EXACT ? value : as_stored<T>(value);
    }
};

// SHARED: columns under one scale, where the compiler is to know them; else 0.
template <int CODES, class T, bool EXACT, int SHARED>
struct Product {
    const Matrix& w;
    const float* a;
    int64_t ld_a, rows;
    T* out;
    int64_t ld_out;

    static constexpr uint64_t PACKED = packed(CODES) ? 2 : 1;
    static constexpr bool ROUNDS_SCALES = CODES == E2M1 && !std::is_same<T, float>::value;

    // Rows [column, end) of W.
    template <int ROWS>
    void multiply(int64_t column, int64_t end) const {
        constexpr int COLUMNS = tile_columns(ROWS);
        const int64_t groups = w.groups();
        auto* scales = (Scale*)common::scratch<0>(2 * COLUMNS * groups);
        for (; column < end; column += COLUMNS) {
            const int64_t last = std::min(column + COLUMNS, end) - 1;
            bool ordinary = w.group % LANES == 0 || w.group >= w.columns;
            for (int j = 0; j < COLUMNS && ordinary; ++j)
                ordinary = read_scales(std::min(column + j, last), scales + j * groups);
            if (!ordinary) decoded(column, last);
            else
                for (int64_t row = 0; row < rows; row += ROWS) tile<ROWS, COLUMNS>(row, column, last, scales);
        }
    }

    // Those of a row; returns whether they are ordinary.
    bool read_scales(int64_t row, Scale* to) const {
        const int64_t groups = w.groups();
        float* whole = common::scratch<1>(2 * groups);
        float* threes = whole + groups;
        row_scales(w, row, whole);
        Int odd = {};
        simd::for_each(groups, [&](auto, int64_t i, int64_t count) {
            const Float value = simd::load_up_to(whole + i, count);
            const Float size = (Float)((Int)value & 0x7FFFFFFF);
            odd |= ~((size == 0.0f) | ((size >= LEAST_SCALE) & (size <= MOST_SCALE)));
            if (!ROUNDS_SCALES) return;
            simd::store_up_to(threes + i, as_stored<T>(value * 1.5f), count);
            simd::store_up_to(whole + i, as_stored<T>(value), count);
        });
        for (int64_t i = 0; i < groups; ++i) to[i] = {whole[i], ROUNDS_SCALES ? threes[i] : 0.0f};
        int32_t any = 0;
        for (int i = 0; i < LANES; ++i) any |= odd[i];
        return any == 0;
    }

    template <int COLUMNS>
    using Groups = Group<CODES, T, EXACT>[COLUMNS];

    // Rows of A from `row` on with rows [column, last] of W; the last stands for those that the tile has beyond it.
    template <int ROWS, int COLUMNS>
    void tile(int64_t row, int64_t column, int64_t last, const Scale* scales) const {
        const float* from = a + row * ld_a;
        const auto w_row = [&](int j) { return std::min(column + j, last); };
        const uint8_t* codes[COLUMNS];
        for (int j = 0; j < COLUMNS; ++j) codes[j] = w.codes + w_row(j) * w.ld_codes;
        const int64_t ahead = row == 0 && column + 2 * COLUMNS <= w.rows ? COLUMNS * w.ld_codes : 0;
        const int64_t group = SHARED ? SHARED : w.group, groups = w.groups();
        Groups<COLUMNS> of = {};
        Float sums[ROWS * COLUMNS] = {};
        const auto start = [&](int64_t g) {
#pragma GCC unroll 4
            for (int j = 0; j < COLUMNS; ++j)
                of[j].set(scales[j * groups + g], CODES == INT4 ? zero_point(w, w_row(j), g) : 0);
        };
        const auto add = [&](int64_t k, int64_t count) __attribute__((always_inline)) {
            Float numbers[COLUMNS];
#pragma GCC unroll 4
            for (int j = 0; j < COLUMNS; ++j) numbers[j] = of[j].at(codes[j] + (uint64_t)k / PACKED, count);
            if (ahead && k % (LINE * PACKED) == 0)
#pragma GCC unroll 4
                for (int j = 0; j < COLUMNS; ++j) __builtin_prefetch(codes[j] + ahead + (uint64_t)k / PACKED, 0, 2);
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; ++i) {
                const Float factor = simd::load(from + i * ld_a + k);
#pragma GCC unroll 4
                for (int j = 0; j < COLUMNS; ++j) sums[i * COLUMNS + j] += factor * numbers[j];
            }
        };
        int64_t k = 0, g = 0;
        while (group % LANES == 0 && k + group <= w.columns) {
            start(g++);
            for (const int64_t end = k + group; k < end; k += LANES) add(k, (int64_t)LANES);
        }
        if (k < w.columns) start(g);
        for (; k + LANES <= w.columns; k += LANES) add(k, (int64_t)LANES);
        if (k < w.columns) add(k, w.columns - k);
        alignas(64) float found[(ROWS * COLUMNS + LANES - 1) / LANES * LANES];
        simd::lane_sums(sums, found);
        for (int64_t i = 0; i < std::min<int64_t>(ROWS, rows - row); ++i)
            for (int64_t j = 0; j <= last - column; ++j)
                simd::store_one(out + (row + i) * ld_out + column + j, found[i * COLUMNS + j]);
    }

    // The same by way of memory.
    void decoded(int64_t column, int64_t last) const {
        float* scales = common::scratch<1>(w.groups());
        T* numbers = (T*)common::scratch<2>(w.columns);
        for (; column <= last; ++column) {
            row_scales(w, column, scales);
            decode_row<CODES>(w, column, scales, 0, w.columns, numbers);
            for (int64_t row = 0; row < rows; ++row) {
                Float sums[1] = {};
                for (int64_t k = 0; k < w.columns; k += LANES)
                    sums[0] += simd::load(a + row * ld_a + k) * simd::load_up_to(numbers + k, w.columns - k);
                alignas(64) float found[LANES];
                simd::lane_sums(sums, found);
                simd::store_one(out + row * ld_out + column, found[0]);
            }
        }
    }
};

template <int ROWS, int CODES, class T, bool EXACT, int SHARED>
void in_tiles(int threads, const Product<CODES, T, EXACT, SHARED>& of) {
    common::parallel_for(threads, common::ceil_div(of.w.rows, ITEM), [&](int64_t item) {
        of.template multiply<ROWS>(item * ITEM, std::min(of.w.rows, (item + 1) * ITEM));
    });
}

template <int CODES, class T, bool EXACT, int SHARED>
void product(int threads, const Matrix& w, int64_t rows, const T* a, int64_t ld_a, T* out, int64_t ld_out) {
    // a vector more than needed, so that rows do not meet in one set of the cache
    const int64_t ld = (common::ceil_div(w.columns, LANES) + 1) * LANES;
    const int64_t height = common::ceil_div(rows, MOST_ROWS) * MOST_ROWS;
    float* wide = common::scratch<3>(height * ld);
    memset(wide, 0, height * ld * sizeof *wide);
    simd::widen_rows(a, ld_a, rows, w.columns, wide, ld);
    const Product<CODES, T, EXACT, SHARED> of = {w, wide, ld, rows, out, ld_out};
    if (rows == 1) in_tiles<1>(threads, of);
    else if (rows == 2) in_tiles<2>(threads, of);
    else if (rows <= 4) in_tiles<4>(threads, of);
    else in_tiles<MOST_ROWS>(threads, of);
}

}  // namespace

}  // namespace formats

// out [a_rows, rows] = a [a_rows, columns] * the transpose of w [rows, columns], which is as in formats::Matrix. out must
// overlap no other.
EXPORT void engine_coded_product(int threads, int type, int64_t rows, int64_t columns, int code_type,
                                 const uint8_t* codes, int64_t ld_codes, int scale_type, const void* scales,
                                 int64_t ld_scales, int64_t joint, int64_t granule, int64_t group,
                                 const float* tensor_scale, const uint8_t* zeros, int64_t ld_zeros, int keeps_scales,
                                 int64_t a_rows, const void* a, int64_t ld_a, void* out, int64_t ld_out) {
    using namespace formats;
    const Matrix w = {rows,  columns, codes, ld_codes,     scale_type, scales,   ld_scales,
                      joint, granule, group, tensor_scale, zeros,      ld_zeros, keeps_scales != 0};
    const bool powers = scale_type == EXPONENT || scale_type == EXPONENT_ABOVE;
    simd::with_type(type, [&](auto number) {
        using T = decltype(number);
        const auto multiply = [&](auto kind, auto exact, auto shared) {
            product<kind(), T, exact(), shared()>(threads, w, a_rows, (const T*)a, ld_a, (T*)out, ld_out);
        };
        const std::integral_constant<int, 0> any;
        with_codes(code_type, [&](auto kind) {
            if constexpr (kind() == E2M1) {
                if (group == 16) return multiply(kind, std::false_type(), std::integral_constant<int, 16>());
            } else if constexpr (kind() == E4M3) {
                if (powers) return multiply(kind, std::true_type(), any);
            }
            multiply(kind, std::false_type(), any);
        });
    });
}
REPLAYED(engine_coded_product)
