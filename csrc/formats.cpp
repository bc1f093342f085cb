// Weights in vendors' formats, decoded to fp32 or bf16; see formats.h.
#include "formats.h"

namespace formats {

namespace {

constexpr int64_t ELEMENTS = 1 << 14;  // about as many are one item of work

template <int CODES, class T>
void decode(int threads, const Matrix& of, T* out, int64_t ld_out) {
    const int64_t run = std::max<int64_t>(1, ELEMENTS / std::max<int64_t>(of.columns, 1));
    common::parallel_for(threads, common::ceil_div(of.rows, run), [=](int64_t item) {
        float* scales = common::scratch(of.groups());
        for (int64_t row = item * run; row < std::min(of.rows, (item + 1) * run); ++row) {
            if (row == item * run || row % of.granule == 0) row_scales(of, row, scales);
            decode_row<CODES>(of, row, scales, 0, of.columns, out + row * ld_out);
        }
    });
}

}  // namespace

}  // namespace formats

// out [rows, columns] of `type`. The rest is as in formats::Matrix.
EXPORT void engine_block_decode(int threads, int type, int64_t rows, int64_t columns, int code_type,
                                const uint8_t* codes, int64_t ld_codes, int scale_type, const void* scales,
                                int64_t ld_scales, int64_t joint, int64_t granule, int64_t group,
                                const float* tensor_scale, const uint8_t* zeros, int64_t ld_zeros, int keeps_scales,
                                void* out, int64_t ld_out) {
    const formats::Matrix of = {rows,  columns, codes, ld_codes,     scale_type, scales,   ld_scales,
                                joint, granule, group, tensor_scale, zeros,      ld_zeros, keeps_scales != 0};
    simd::with_type(type, [&](auto zero) {
        using T = decltype(zero);
        formats::with_codes(code_type, [&](auto kind) {
            formats::decode<kind()>(threads, of, (T*)out, ld_out);
        });
    });
}
REPLAYED(engine_block_decode)
