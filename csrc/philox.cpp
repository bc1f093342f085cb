// Dropout masks: a pure function of (seed, site, step, token, feature), the same bits as triton_kernels/philox.py.
//
// A 64-bit lane holds one 32-bit word of the state. The multiplier reads only the low half of a lane, so what the
// xors leave in the high half never matters, and high and low product come from one multiplication.
#include "philox.h"

#include "common.h"
#include "simd.h"

namespace philox {
namespace {

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
#elif SIMD_AVX2
typedef __m256i Wide;
constexpr int CALLS = 4;
SIMD_INLINE Wide wide(uint64_t value) { return _mm256_set1_epi64x((long long)value); }
SIMD_INLINE Wide multiply(Wide a, Wide b) { return _mm256_mul_epu32(a, b); }
SIMD_INLINE Wide high(Wide a) { return _mm256_srli_epi64(a, 32); }
SIMD_INLINE Wide xor3(Wide a, Wide b, Wide c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }
#else
typedef uint64_t Wide;
constexpr int CALLS = 1;
SIMD_INLINE Wide wide(uint64_t value) { return value; }
SIMD_INLINE Wide multiply(Wide a, Wide b) { return (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu); }
SIMD_INLINE Wide high(Wide a) { return a >> 32; }
SIMD_INLINE Wide xor3(Wide a, Wide b, Wide c) { return a ^ b ^ c; }
#endif

// Several independent sets of calls at a time: the multiplications of one hide the latency of the others.
constexpr int SETS = CALLS == 8 ? 4 : 2;  // as many as there are registers for

struct State {
    Wide c0[SETS], c1[SETS], c2[SETS], c3[SETS];
};

SIMD_INLINE void ten_rounds(State& s, uint32_t k0, uint32_t k1) {
    const Wide m0 = wide(MULTIPLIER_0), m1 = wide(MULTIPLIER_1);
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
        const Wide key0 = wide(k0), key1 = wide(k1);
#pragma GCC unroll 4
        for (int i = 0; i < SETS; ++i) {
            const Wide product0 = multiply(s.c0[i], m0), product1 = multiply(s.c2[i], m1);
            s.c0[i] = xor3(high(product1), s.c1[i], key0);
            s.c1[i] = product1;
            s.c2[i] = xor3(high(product0), s.c3[i], key1);
            s.c3[i] = product0;
        }
        k0 += WEYL_0;
        k1 += WEYL_1;
    }
}

// Writes CALLS bytes: the decisions of one set.
#if SIMD_AVX512
// Unpacking pairs even lanes with even lanes: with this order of blocks in lanes the bytes come out in order.
SIMD_INLINE Wide lane_blocks() { return _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7); }
SIMD_INLINE Wide add(Wide a, uint64_t b) { return _mm512_add_epi64(a, wide(b)); }
SIMD_INLINE void decide(const State& s, int i, uint32_t threshold, uint8_t* out) {
    const __mmask16 odd = 0xAAAA;
    const Wide first = _mm512_mask_mov_epi32(s.c0[i], odd, _mm512_slli_epi64(s.c1[i], 32));
    const Wide second = _mm512_mask_mov_epi32(s.c2[i], odd, _mm512_slli_epi64(s.c3[i], 32));
    const Wide limit = _mm512_set1_epi16((short)threshold);
    const uint32_t bits[2] = {_mm512_cmpge_epu16_mask(_mm512_unpacklo_epi64(first, second), limit),
                              _mm512_cmpge_epu16_mask(_mm512_unpackhi_epi64(first, second), limit)};
    memcpy(out, bits, sizeof bits);
}
#elif SIMD_AVX2
SIMD_INLINE Wide lane_blocks() { return _mm256_setr_epi64x(0, 1, 2, 3); }
SIMD_INLINE Wide add(Wide a, uint64_t b) { return _mm256_add_epi64(a, wide(b)); }
SIMD_INLINE void decide(const State& s, int i, uint32_t threshold, uint8_t* out) {
    const Wide first = _mm256_blend_epi32(s.c0[i], _mm256_slli_epi64(s.c1[i], 32), 0xAA);
    const Wide second = _mm256_blend_epi32(s.c2[i], _mm256_slli_epi64(s.c3[i], 32), 0xAA);
    const Wide limit = _mm256_set1_epi16((short)threshold);
    const Wide even = _mm256_unpacklo_epi64(first, second), odd = _mm256_unpackhi_epi64(first, second);
    const Wide kept_even = _mm256_cmpeq_epi16(_mm256_max_epu16(even, limit), even);
    const Wide kept_odd = _mm256_cmpeq_epi16(_mm256_max_epu16(odd, limit), odd);
    // within each 128-bit half: eight decisions of the even block, then eight of the odd one
    const uint32_t bits = (uint32_t)_mm256_movemask_epi8(_mm256_packs_epi16(kept_even, kept_odd));
    memcpy(out, &bits, sizeof bits);
}
#else
SIMD_INLINE Wide lane_blocks() { return 0; }
SIMD_INLINE Wide add(Wide a, uint64_t b) { return a + b; }
SIMD_INLINE void decide(const State& s, int i, uint32_t threshold, uint8_t* out) {
    const uint64_t words[4] = {s.c0[i], s.c1[i], s.c2[i], s.c3[i]};
    unsigned bits = 0;
    for (int word = 0; word < 4; ++word) {
        bits |= (unsigned)((words[word] & 0xFFFF) >= threshold) << (2 * word);
        bits |= (unsigned)(((words[word] >> 16) & 0xFFFF) >= threshold) << (2 * word + 1);
    }
    *out = (uint8_t)bits;
}
#endif

}  // namespace

void keep_bits(const Stream& stream, int64_t token, int64_t first_block, int64_t num_blocks, uint32_t threshold,
               uint8_t* out) {
    if (threshold > 0xFFFF) {
        memset(out, 0, (size_t)num_blocks);
        return;
    }
    constexpr int64_t width = SETS * CALLS;
    for (int64_t block = 0; block < num_blocks; block += width) {
        State s;
        for (int i = 0; i < SETS; ++i) {
            s.c0[i] = add(lane_blocks(), (uint64_t)(first_block + block + i * CALLS));
            s.c1[i] = wide((uint64_t)token & 0xFFFFFFFFu);
            s.c2[i] = wide((uint64_t)token >> 32);
            s.c3[i] = wide(stream.step);
        }
        ten_rounds(s, stream.seed, stream.site);
        uint8_t bytes[width];
        for (int i = 0; i < SETS; ++i) decide(s, i, threshold, bytes + i * CALLS);
        if (num_blocks - block >= width) memcpy(out + block, bytes, width);
        else memcpy(out + block, bytes, (size_t)(num_blocks - block));
    }
}

}  // namespace philox

namespace {

// One row of decisions for local features [0, features), bit i of byte b = feature 8 b + i; the bits after are 0.
void row_bits(const philox::Stream& stream, int64_t token, int64_t offset, int64_t features, uint32_t threshold,
              uint8_t* out, int64_t row_bytes, uint8_t* blocks) {
    const int64_t first = offset >> 3, last = (offset + features - 1) >> 3, used = common::ceil_div(features, 8);
    const int shift = (int)(offset & 7);
    if (shift == 0) {
        philox::keep_bits(stream, token, first, last - first + 1, threshold, out);
    } else {
        philox::keep_bits(stream, token, first, last - first + 1, threshold, blocks);
        blocks[last - first + 1] = 0;
        for (int64_t byte = 0; byte < used; ++byte)
            out[byte] = (uint8_t)((blocks[byte] | blocks[byte + 1] << 8) >> shift);
    }
    if (features & 7) out[used - 1] &= (uint8_t)((1 << (features & 7)) - 1);
    memset(out + used, 0, (size_t)(row_bytes - used));
}

}  // namespace

// bits: [tokens, row_bytes], row_bytes >= ceil(features / 8); `threshold` of 65536 draws mean "drop".
EXPORT void engine_dropout_bits(int threads, int64_t tokens, int64_t features, const int64_t* token_index,
                                int64_t feature_offset, uint32_t threshold, uint32_t seed, uint32_t site, uint32_t step,
                                uint8_t* bits, int64_t row_bytes) {
    if (features <= 0) return;
    const philox::Stream stream = {seed, site, step};
    constexpr int64_t ROWS = 16;
    common::parallel_for(threads, common::ceil_div(tokens, ROWS), [=](int64_t item) {
        uint8_t* blocks = (uint8_t*)common::scratch((features / 8 + 3) / 4 + 2);
        for (int64_t t = item * ROWS; t < tokens && t < (item + 1) * ROWS; ++t)
            row_bits(stream, token_index[t], feature_offset, features, threshold, bits + t * row_bytes, row_bytes,
                     blocks);
    });
}

// Packed bits to one byte (0 or 1) an element, [tokens, features] without gaps.
EXPORT void engine_unpack_bits(int threads, int64_t tokens, int64_t features, const uint8_t* bits, int64_t row_bytes,
                               uint8_t* mask) {
    constexpr int64_t ROWS = 16;
    common::parallel_for(threads, common::ceil_div(tokens, ROWS), [=](int64_t item) {
        for (int64_t t = item * ROWS; t < tokens && t < (item + 1) * ROWS; ++t) {
            const uint8_t* row = bits + t * row_bytes;
            uint8_t* to = mask + t * features;
            int64_t f = 0;
            for (; f + 8 <= features; f += 8) {
                // bit i to byte i: spread by a multiplication, isolate, move to the byte's lowest bit
                uint64_t spread = (row[f >> 3] * 0x0101010101010101ull) & 0x8040201008040201ull;
                spread = (spread + 0x7F7F7F7F7F7F7F7Full) >> 7 & 0x0101010101010101ull;
                memcpy(to + f, &spread, 8);
            }
            for (; f < features; ++f) to[f] = row[f >> 3] >> (f & 7) & 1;
        }
    });
}
