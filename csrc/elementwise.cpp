// Sums and multiples of numbers that lie in order, of rows as small as those of a decode pass: one thread.
#include "common.h"
#include "simd.h"

// out = a + b; out may be a or b.
EXPORT void engine_add(int, int type, int64_t size, const void* a, const void* b, void* out) {
    simd::with_type(type, [=](auto zero) {
        using T = decltype(zero);
        simd::for_each(size, [=](auto, int64_t i, int64_t count) {
            const simd::Float first = simd::load_up_to((const T*)a + i, count);
            simd::store_up_to((T*)out + i, first + simd::load_up_to((const T*)b + i, count), count);
        });
    });
}
REPLAYED(engine_add)

// Multiplies [rows, columns] in place.
EXPORT void engine_scale(int, int type, int64_t rows, int64_t columns, float factor, void* data, int64_t ld) {
    simd::with_type(type, [=](auto zero) {
        using T = decltype(zero);
        for (int64_t row = 0; row < rows; ++row) {
            T* at = (T*)data + row * ld;
            simd::for_each(columns, [=](auto, int64_t i, int64_t count) {
                simd::store_up_to(at + i, simd::load_up_to(at + i, count) * factor, count);
            });
        }
    });
}
REPLAYED(engine_scale)
