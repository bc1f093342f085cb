// The rounds of Philox-4x32-10 (Salmon et al., SC 2011), as engine/kernels/philox.py has them, for many counters at
// once.
//
// A 64-bit lane holds one 32-bit word of the state. The multiplier reads only the low half of a lane, so what the
// xors leave in the high half never matters, and high and low product come from one multiplication.
#pragma once

#include <cstdint>

#include "simd.h"

namespace philox {

struct Stream {
    uint32_t seed, site, step;
};

constexpr uint32_t MULTIPLIER_0 = 0xD2511F53u, MULTIPLIER_1 = 0xCD9E8D57u;
constexpr uint32_t WEYL_0 = 0x9E3779B9u, WEYL_1 = 0xBB67AE85u;

#if SIMD_AVX512
typedef __m512i Wide;
constexpr int CALLS = 8;
SIMD_INLINE Wide wide(uint64_t value) { return _mm512_set1_epi64((long long)value); }
SIMD_INLINE Wide multiply(Wide a, Wide b) { return _mm512_mul_epu32(a, b); }
// as a shuffle, since multiplications fill the port that shifts would take; it leaves the high half as it was
SIMD_INLINE Wide high(Wide a) { return _mm512_castps_si512(_mm512_movehdup_ps(_mm512_castsi512_ps(a))); }
SIMD_INLINE Wide xor3(Wide a, Wide b, Wide c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }
SIMD_INLINE Wide add(Wide a, uint64_t b) { return _mm512_add_epi64(a, wide(b)); }
// Unpacking pairs even lanes with even lanes: with this order of blocks in lanes the words come out in order.
SIMD_INLINE Wide lane_blocks() { return _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7); }
#elif SIMD_AVX2
typedef __m256i Wide;
constexpr int CALLS = 4;
SIMD_INLINE Wide wide(uint64_t value) { return _mm256_set1_epi64x((long long)value); }
SIMD_INLINE Wide multiply(Wide a, Wide b) { return _mm256_mul_epu32(a, b); }
SIMD_INLINE Wide high(Wide a) { return _mm256_srli_epi64(a, 32); }
SIMD_INLINE Wide xor3(Wide a, Wide b, Wide c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }
SIMD_INLINE Wide add(Wide a, uint64_t b) { return _mm256_add_epi64(a, wide(b)); }
SIMD_INLINE Wide lane_blocks() { return _mm256_setr_epi64x(0, 1, 2, 3); }
#else
typedef uint64_t Wide;
constexpr int CALLS = 1;
SIMD_INLINE Wide wide(uint64_t value) { return value; }
SIMD_INLINE Wide multiply(Wide a, Wide b) { return (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu); }
SIMD_INLINE Wide high(Wide a) { return a >> 32; }
SIMD_INLINE Wide xor3(Wide a, Wide b, Wide c) { return a ^ b ^ c; }
SIMD_INLINE Wide add(Wide a, uint64_t b) { return a + b; }
SIMD_INLINE Wide lane_blocks() { return 0; }
#endif

// Several independent sets of calls at a time: the multiplications of one hide the latency of the others.
constexpr int SETS = CALLS == 8 ? 4 : 2;  // as many as there are registers for

constexpr int64_t WIDTH = SETS * CALLS;  // counters that are computed together

struct State {
    Wide c0[SETS], c1[SETS], c2[SETS], c3[SETS];
};

// Rounds `FIRST` to the last one.
template <int FIRST>
SIMD_INLINE void rounds(State& s, const Stream& stream) {
    const Wide m0 = wide(MULTIPLIER_0), m1 = wide(MULTIPLIER_1);
#pragma GCC unroll 10
    for (int round = FIRST; round < 10; ++round) {
        const Wide key0 = wide(stream.seed + round * WEYL_0), key1 = wide(stream.site + round * WEYL_1);
#pragma GCC unroll 4
        for (int i = 0; i < SETS; ++i) {
            const Wide product0 = multiply(s.c0[i], m0), product1 = multiply(s.c2[i], m1);
            s.c0[i] = xor3(high(product1), s.c1[i], key0);
            s.c1[i] = product1;
            s.c2[i] = xor3(high(product0), s.c3[i], key1);
            s.c3[i] = product0;
        }
    }
}

}  // namespace philox
