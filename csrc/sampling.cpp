// Draws a token of each row: the first of the largest sums of a score and a standard Gumbel number, see
// engine/inference/sampling.py, which has the same draws.
//
// With the largest sum b so far, a score s and its draw u from (0, 1) are larger where s - log(-log u) > b, that is
// where 1 - u < 1 - exp(-exp(s - b)). The right side is below exp(s - b): one exponential and a comparison pass over
// all but a few scores, whose sums are then computed in double. Scores so far below b that no draw could reach it are
// passed over without drawing.
#include <algorithm>
#include <limits>

#include "common.h"
#include "philox.h"
#include "simd.h"

namespace {

constexpr int64_t DRAWS = 4 * philox::WIDTH;
constexpr float SMALLEST = 0.5f / 4294967296.0f;  // of 1 - u
constexpr float SLACK = 1.01f;                    // for what s - b loses in fp32, up to |b| = 10^5

struct Best {
    double sum = -std::numeric_limits<double>::infinity();
    int64_t column = 0;
};

// The 32-bit words of WIDTH counters (block first + n, row, high word of the row, position), in order.
void draw(const philox::Stream& key, uint64_t row, uint32_t position, int64_t first, uint32_t* out) {
    philox::State s;
    for (int i = 0; i < philox::SETS; ++i) {
        s.c0[i] = philox::add(philox::lane_blocks(), (uint64_t)(first + i * philox::CALLS));
        s.c1[i] = philox::wide((uint32_t)row);
        s.c2[i] = philox::wide((uint32_t)(row >> 32));
        s.c3[i] = philox::wide(position);
    }
    philox::rounds<0>(s, key);
    for (int i = 0; i < philox::SETS; ++i, out += 4 * philox::CALLS) {
#if SIMD_AVX512
        const __mmask16 odd = 0xAAAA;
        const __m512i first_two = _mm512_mask_mov_epi32(s.c0[i], odd, _mm512_slli_epi64(s.c1[i], 32));
        const __m512i last_two = _mm512_mask_mov_epi32(s.c2[i], odd, _mm512_slli_epi64(s.c3[i], 32));
        _mm512_storeu_si512(out, _mm512_unpacklo_epi64(first_two, last_two));
        _mm512_storeu_si512(out + 16, _mm512_unpackhi_epi64(first_two, last_two));
#else
        uint64_t words[4][philox::CALLS];
        memcpy(words[0], &s.c0[i], sizeof words[0]);
        memcpy(words[1], &s.c1[i], sizeof words[1]);
        memcpy(words[2], &s.c2[i], sizeof words[2]);
        memcpy(words[3], &s.c3[i], sizeof words[3]);
        for (int n = 0; n < 4 * philox::CALLS; ++n) out[n] = (uint32_t)words[n % 4][n / 4];
#endif
    }
}

Best draw_row(const philox::Stream& key, uint64_t row, uint32_t position, const float* scores, int64_t columns,
              int64_t first_id) {
    Best best;
    float reach[DRAWS];  // exp(s - b)
    uint32_t draws[DRAWS];
    // the block of the first id may begin before it
    for (int64_t base = -(first_id % 4); base < columns; base += DRAWS) {
        const int64_t from = std::max<int64_t>(base, 0), to = std::min(base + DRAWS, columns);
        std::fill(reach, reach + DRAWS, 0.0f);
        const float above = (float)best.sum;
        simd::Int reached = {};
        simd::for_each(to - from, [&](auto, int64_t i, int64_t count) {
            const simd::Float value = simd::exp(simd::load_up_to(scores + from + i, count) - above) * SLACK;
            simd::store_up_to(reach + from - base + i, value, count);
            reached |= value >= SMALLEST;
        });
        bool any = false;
        for (int lane = 0; lane < simd::LANES; ++lane) any = any || reached[lane];
        if (!any) continue;
        draw(key, row, position, (first_id + base) / 4, draws);
        for (int64_t i = 0; i < DRAWS; i += simd::LANES) {
            simd::Word word;
            memcpy(&word, draws + i, sizeof word);
            const simd::Float rest = (__builtin_convertvector(~word, simd::Float) + 0.5f) * (1.0f / 4294967296.0f);
            const simd::Int larger = rest <= simd::load(reach + i);
            bool some = false;
            for (int lane = 0; lane < simd::LANES; ++lane) some = some || larger[lane];
            if (!some) continue;
            for (int64_t n = std::max(i, from - base); n < std::min(i + simd::LANES, to - base); ++n) {
                if (!larger[n - i]) continue;
                const double uniform = (draws[n] + 0.5) * (1.0 / 4294967296.0);
                const double sum = (double)scores[base + n] - std::log(-std::log(uniform));
                if (sum > best.sum) best = {sum, base + n};
            }
        }
    }
    return best;
}

}  // namespace

// scores: fp32 [rows, columns], of the ids from first_id on. sums, columns_out: the largest sum of each row, and where
// it is; -inf and 0 where no score is above -inf.
EXPORT void engine_gumbel_argmax(int threads, int64_t rows, int64_t columns, const float* scores, int64_t ld_scores,
                                 const int64_t* row_numbers, const int64_t* positions, int64_t first_id, uint32_t seed,
                                 uint32_t site, double* sums, int64_t* columns_out) {
    const philox::Stream key = {seed, site, 0};
    common::parallel_for(threads, rows, [=](int64_t row) {
        const Best best = draw_row(key, (uint64_t)row_numbers[row], (uint32_t)positions[row], scores + row * ld_scores,
                                   columns, first_id);
        sums[row] = best.sum;
        columns_out[row] = best.column;
    });
}
REPLAYED(engine_gumbel_argmax)
