// Dropout masks: a pure function of (seed, site, step, token, feature), the same bits as engine/kernels/philox.py, from
// Philox-4x32-10 (Salmon et al., SC 2011).
//
// The counter is (block of eight features, token, high word of the token, step). In the first two rounds, and in half
// of the third, each product is of words that depend either on the block or on the token alone: `prepare` makes those
// of the blocks once for many tokens, which leaves seven and a half rounds of ten.
#include <algorithm>

#include "common.h"
#include "philox.h"
#include "simd.h"

namespace philox {
namespace {

constexpr int PREPARED = 3;  // rounds that `prepare` begins

// Writes CALLS bytes: the decisions of one set.
#if SIMD_AVX512
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

// What the first rounds know of CALLS blocks: parts of the words that go into, and come out of, the third.
struct Block {
    Wide into_c2, out_c0, out_c2, out_c3;
};

int64_t num_prepared(int64_t num_blocks) { return common::ceil_div(num_blocks, WIDTH) * SETS; }

// For the tokens with this high word.
void prepare(const Stream& stream, uint32_t token_high, int64_t first_block, int64_t num_blocks, Block* out) {
    const uint32_t c1 = token_high * MULTIPLIER_1;  // after the first round
    for (int64_t i = 0; i < num_prepared(num_blocks); ++i) {
        const Wide product0 = multiply(add(lane_blocks(), (uint64_t)(first_block + i * CALLS)), wide(MULTIPLIER_0));
        const Wide product1 = multiply(xor3(high(product0), wide(stream.step), wide(stream.site)), wide(MULTIPLIER_1));
        const Wide c0 = xor3(high(product1), wide(c1), wide(stream.seed + WEYL_0));
        const Wide third = multiply(c0, wide(MULTIPLIER_0)), none = wide(0);
        out[i] = {xor3(product0, wide(stream.site + WEYL_1), none),
                  xor3(product1, wide(stream.seed + 2 * WEYL_0), none),
                  xor3(high(third), wide(stream.site + 2 * WEYL_1), none), third};
    }
}

// Eight decisions a block, bit i of out[n] = lane i of block first_block + n.
void keep_bits(const Stream& stream, int64_t token, const Block* prepared, int64_t num_blocks, uint32_t threshold,
               uint8_t* out) {
    const uint64_t high_product = ((uint64_t)token >> 32) * MULTIPLIER_1;
    const uint64_t of_token = (uint64_t)((uint32_t)(high_product >> 32) ^ (uint32_t)token ^ stream.seed) * MULTIPLIER_0;
    const Wide token_high = wide(of_token >> 32), token_low = wide(of_token & 0xFFFFFFFFu), none = wide(0);
    for (int64_t block = 0; block < num_blocks; block += WIDTH, prepared += SETS) {
        State s;
        for (int i = 0; i < SETS; ++i) {
            const Wide product1 = multiply(xor3(prepared[i].into_c2, token_high, none), wide(MULTIPLIER_1));
            s.c0[i] = xor3(high(product1), prepared[i].out_c0, none);
            s.c1[i] = product1;
            s.c2[i] = xor3(prepared[i].out_c2, token_low, none);
            s.c3[i] = prepared[i].out_c3;
        }
        rounds<PREPARED>(s, stream);
        uint8_t bytes[WIDTH];
        for (int i = 0; i < SETS; ++i) decide(s, i, threshold, bytes + i * CALLS);
        memcpy(out + block, bytes, (size_t)std::min(WIDTH, num_blocks - block));
    }
}

}  // namespace
}  // namespace philox

namespace {

// Some features of a row, and what is known of their blocks.
struct Row {
    int64_t offset, features, bytes;
    uint32_t threshold;
    const philox::Block* prepared;

    int64_t first() const { return offset >> 3; }
    int64_t num_blocks() const { return ((offset + features - 1) >> 3) - first() + 1; }
};

// Decisions for local features [0, features), bit i of byte b = feature 8 b + i; the bits after are 0.
void row_bits(const philox::Stream& stream, int64_t token, const Row& row, uint8_t* blocks, uint8_t* out) {
    const int64_t used = common::ceil_div(row.features, 8);
    const int shift = (int)(row.offset & 7);
    philox::keep_bits(stream, token, row.prepared, row.num_blocks(), row.threshold, shift ? blocks : out);
    if (shift) {
        blocks[row.num_blocks()] = 0;
        for (int64_t byte = 0; byte < used; ++byte)
            out[byte] = (uint8_t)((blocks[byte] | blocks[byte + 1] << 8) >> shift);
    }
    if (row.features & 7) out[used - 1] &= (uint8_t)((1 << (row.features & 7)) - 1);
    memset(out + used, 0, (size_t)(row.bytes - used));
}

// Which draws, of which tokens and features.
struct Draws {
    int64_t tokens, features;
    const int64_t* token_index;
    int64_t feature_offset;
    uint32_t threshold;
    philox::Stream stream;
};

// Calls body(t, draw) for each token, where draw(out) writes its decisions in `row_bytes` bytes, >= ceil(features / 8).
template <class Body>
void for_each_row(int threads, const Draws& draws, int64_t row_bytes, Body body) {
    constexpr int64_t ROWS = 32;
    common::parallel_for(threads, common::ceil_div(draws.tokens, ROWS), [=](int64_t item) {
        Row row = {draws.feature_offset, draws.features, row_bytes, draws.threshold, nullptr};
        uint8_t* blocks = (uint8_t*)common::scratch(row.num_blocks() / 4 + 2);
        const int64_t size = philox::num_prepared(row.num_blocks()) * (int64_t)sizeof(philox::Block);
        philox::Block* prepared = (philox::Block*)common::scratch<1>(size / (int64_t)sizeof(float));
        row.prepared = prepared;
        const int64_t* token_index = draws.token_index;
        for (int64_t t = item * ROWS; t < std::min(draws.tokens, (item + 1) * ROWS); ++t) {
            const uint32_t high = (uint32_t)((uint64_t)token_index[t] >> 32);
            if (t == item * ROWS || high != (uint32_t)((uint64_t)token_index[t - 1] >> 32))
                philox::prepare(draws.stream, high, row.first(), row.num_blocks(), prepared);
            body(t, [&](uint8_t* out) { row_bits(draws.stream, token_index[t], row, blocks, out); });
        }
    });
}

// out = added + scale x where a bit is 1; `added` may be null or `out`.
template <class T>
void drop_row(int64_t features, const uint8_t* bits, float scale, const T* x, const T* added, T* out) {
    simd::for_each(features, [=](auto, int64_t f, int64_t count) {
        simd::Float y = simd::keep_lanes(simd::load_up_to(x + f, count), bits, f) * scale;
        if (added) y += simd::load_up_to(added + f, count);
        simd::store_up_to(out + f, y, count);
    });
}

}  // namespace

// bits: [tokens, row_bytes], row_bytes >= ceil(features / 8); `threshold` of 65536 draws mean "drop".
EXPORT void engine_dropout_bits(int threads, int64_t tokens, int64_t features, const int64_t* token_index,
                                int64_t feature_offset, uint32_t threshold, uint32_t seed, uint32_t site, uint32_t step,
                                uint8_t* bits, int64_t row_bytes) {
    if (features <= 0) return;
    if (threshold > 0xFFFF) {
        memset(bits, 0, (size_t)(tokens * row_bytes));
        return;
    }
    const Draws draws = {tokens, features, token_index, feature_offset, threshold, {seed, site, step}};
    for_each_row(threads, draws, row_bytes, [=](int64_t t, auto draw) { draw(bits + t * row_bytes); });
}

// `threshold` is below 65536; `added` may be null, or `out`.
EXPORT void engine_drop(int threads, int type, int64_t tokens, int64_t features, const int64_t* token_index,
                        int64_t feature_offset, uint32_t threshold, uint32_t seed, uint32_t site, uint32_t step,
                        float scale, const void* x, int64_t ld_x, const void* added, int64_t ld_added, void* out,
                        int64_t ld_out) {
    if (features <= 0) return;
    const Draws draws = {tokens, features, token_index, feature_offset, threshold, {seed, site, step}};
    const int64_t row_bytes = common::ceil_div(features, 64) * 8;  // whole vectors are read of it
    simd::with_type(type, [=](auto zero) {
        using T = decltype(zero);
        for_each_row(threads, draws, row_bytes, [=](int64_t t, auto draw) {
            uint8_t* bits = (uint8_t*)common::scratch<2>(row_bytes / (int64_t)sizeof(float));
            draw(bits);
            drop_row(features, bits, scale, (const T*)x + t * ld_x, added ? (const T*)added + t * ld_added : nullptr,
                     (T*)out + t * ld_out);
        });
    });
}
