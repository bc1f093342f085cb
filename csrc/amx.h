// Products of bfloat16 matrices by AMX tiles, summed in fp32.
//
// HAS_AMX says that the compiler knows the instructions; `ask` says at run time that the processor and the system have
// them. A left operand is row-major, a right one has pairs of rows interleaved: word (k / 2, n) holds b[k, n] below
// b[k + 1, n].
#pragma once

#include <cstdint>

#include "common.h"
#include "simd.h"

#if SIMD_AVX512 && defined(__linux__) && defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HAS_AMX 1
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if HAS_AMX

namespace amx {

using simd::Bf16;

constexpr int64_t STEP = 32;     // sizes are padded to two tiles

inline int64_t padded(int64_t size) { return common::ceil_div(size, STEP) * STEP; }

// Asks the system for the tiles' registers; false where there are none.
inline bool ask() {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const bool tile = d >> 24 & 1, bf16 = d >> 22 & 1;
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return tile && bf16 && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

// Eight tiles of 16 rows of 64 bytes while it lives. What another library had configured on this thread is put back, so
// that one which relies on finding it does.
class Tiles {
  public:
    Tiles() {
        asm volatile("sttilecfg %0" : "=m"(before_));
        Config config = {};
        config.bytes[0] = 1;
        for (int tile = 0; tile < 8; ++tile) {
            config.bytes[16 + 2 * tile] = 64;
            config.bytes[48 + tile] = 16;
        }
        load(config);
    }
    ~Tiles() { load(before_); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

  private:
    struct alignas(64) Config {
        uint8_t bytes[64];
    };
    // instructions by name: intrinsics would want this file compiled for processors that have them
    static void load(const Config& config) { asm volatile("ldtilecfg %0" : : "m"(config)); }
    Config before_;
};

// c[m, n] (+)= a[m, k] b[k, n]; b as pairs of rows interleaved, [k / 2, n] words. Sizes are multiples of STEP.
template <bool ADD>
void product(int64_t m, int64_t n, int64_t k, const Bf16* a, int64_t ld_a, const uint32_t* b, int64_t ld_b, float* c,
             int64_t ld_c) {
    for (int64_t column = 0; column < n; column += STEP)
        for (int64_t row = 0; row < m; row += STEP) {
            float *c0 = c + row * ld_c + column, *c1 = c0 + 16 * ld_c;
            if (ADD) {
                _tile_loadd(0, c0, ld_c * 4);
                _tile_loadd(1, c0 + 16, ld_c * 4);
                _tile_loadd(2, c1, ld_c * 4);
                _tile_loadd(3, c1 + 16, ld_c * 4);
            } else {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
            }
            for (int64_t depth = 0; depth < k; depth += STEP) {
                const Bf16* left = a + row * ld_a + depth;
                const uint32_t* right = b + depth / 2 * ld_b + column;
                _tile_loadd(4, left, ld_a * 2);
                _tile_loadd(6, right, ld_b * 4);
                _tile_loadd(7, right + 16, ld_b * 4);
                _tile_loadd(5, left + 16 * ld_a, ld_a * 2);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, c0, ld_c * 4);
            _tile_stored(1, c0 + 16, ld_c * 4);
            _tile_stored(2, c1, ld_c * 4);
            _tile_stored(3, c1 + 16, ld_c * 4);
        }
}

SIMD_INLINE __m512i words(simd::HalfWord value) { return _mm512_cvtepu16_epi32((__m256i)value); }

SIMD_INLINE void store_pair(uint32_t* to, simd::HalfWord even, simd::HalfWord odd) {
    _mm512_storeu_si512(to, _mm512_or_si512(words(even), _mm512_slli_epi32(words(odd), 16)));
}

}  // namespace amx

#endif
