// Best-fit-decreasing packing, the same rows as engine/data/packing.py's `pack`.
//
// Documents of one length are placed together and rows with the same room are kept together, so that the work grows
// with the number of distinct (length, room) pairs. Plain integers: the result is the same on every machine.
#include <algorithm>

#include "common.h"

namespace {

using common::ceil_div;

// Which rooms have a row, with the smallest one at or above a given room found by words of 64 and words of words.
class Rooms {
  public:
    explicit Rooms(int64_t capacity)
        : low_((size_t)capacity / 64 + 1, 0), high_((size_t)capacity / 4096 + 1, 0), rows_((size_t)capacity + 1) {}

    void keep(int64_t room, const int64_t* first, const int64_t* last) {
        if (first == last || room == 0) return;
        rows_[(size_t)room].insert(rows_[(size_t)room].end(), first, last);
        low_[(size_t)room / 64] |= 1ull << (room & 63);
        high_[(size_t)room / 4096] |= 1ull << (room / 64 & 63);
    }

    // The last `wanted` rows (or as many as there are) with this room, in the order in which they came.
    void take(int64_t room, int64_t wanted, std::vector<int64_t>& out) {
        std::vector<int64_t>& rows = rows_[(size_t)room];
        const int64_t count = std::min(wanted, (int64_t)rows.size());
        out.assign(rows.end() - count, rows.end());
        rows.resize(rows.size() - (size_t)count);
        if (!rows.empty()) return;
        low_[(size_t)room / 64] &= ~(1ull << (room & 63));
        if (!low_[(size_t)room / 64]) high_[(size_t)room / 4096] &= ~(1ull << (room / 64 & 63));
    }

    // The smallest room >= size that a row has; -1 where there is none.
    int64_t smallest_from(int64_t size) const {
        const int64_t word = size / 64;
        const uint64_t here = low_[(size_t)word] >> (size & 63);
        if (here) return size + __builtin_ctzll(here);
        const int64_t next = word + 1;
        for (int64_t block = next / 64; block < (int64_t)high_.size(); ++block) {
            uint64_t words = high_[(size_t)block];
            if (block == next / 64) words = words >> (next & 63) << (next & 63);
            if (!words) continue;
            const int64_t found = block * 64 + __builtin_ctzll(words);
            return found * 64 + __builtin_ctzll(low_[(size_t)found]);
        }
        return -1;
    }

  private:
    std::vector<uint64_t> low_, high_;
    std::vector<std::vector<int64_t>> rows_;
};

// The row of each place in `order` (documents from long to short); returns the number of rows.
int64_t best_fit(int64_t count, const int64_t* lengths, const int64_t* order, int64_t capacity, int64_t* rows) {
    Rooms rooms(capacity);
    std::vector<int64_t> chosen;
    int64_t num_rows = 0;
    for (int64_t first = 0; first < count;) {
        const int64_t size = lengths[order[first]];
        int64_t end = first;
        while (end < count && lengths[order[end]] == size) ++end;
        while (first < end) {
            int64_t room = rooms.smallest_from(size);
            const bool fresh = room < 0;
            if (fresh) room = capacity;
            const int64_t per_row = room / size, wanted = ceil_div(end - first, per_row);
            if (fresh) {
                chosen.resize((size_t)wanted);
                for (int64_t& row : chosen) row = num_rows++;
            } else {
                rooms.take(room, wanted, chosen);
            }
            const int64_t placed = std::min(end - first, (int64_t)chosen.size() * per_row);
            for (int64_t i = 0; i < placed; ++i) rows[first + i] = chosen[(size_t)(i / per_row)];
            first += placed;
            const int64_t full = placed / per_row, rest = placed % per_row;
            rooms.keep(room - per_row * size, chosen.data(), chosen.data() + full);
            rooms.keep(room - rest * size, chosen.data() + full, chosen.data() + chosen.size());
        }
    }
    return num_rows;
}

// The row of each document when a row is closed as soon as one does not fit.
int64_t next_fit(int64_t count, const int64_t* lengths, int64_t capacity, int64_t* rows) {
    int64_t row = 0, filled = 0;
    for (int64_t i = 0; i < count; ++i) {
        if (filled + lengths[i] > capacity) {
            ++row;
            filled = 0;
        }
        filled += lengths[i];
        if (rows) rows[i] = row;
    }
    return count ? row + 1 : 0;
}

// Stable order of key(i) in [0, bins) for i in [0, count): calls place(k, i) where i is the k-th smallest.
template <class Key, class Place>
void counting_sort(int64_t count, int64_t bins, Key key, Place place) {
    std::vector<int64_t> starts((size_t)bins + 1, 0);
    for (int64_t i = 0; i < count; ++i) ++starts[(size_t)key(i) + 1];
    for (int64_t bin = 0; bin < bins; ++bin) starts[(size_t)bin + 1] += starts[(size_t)bin];
    for (int64_t i = 0; i < count; ++i) place(starts[(size_t)key(i)]++, i);
}

}  // namespace

// documents [count] in the order in which they lie in their rows, offsets [count + 1] of which num_rows + 1 are
// written. Every length is in [1, capacity].
EXPORT void engine_pack(int64_t count, const int64_t* lengths, int64_t capacity, int64_t* documents, int64_t* offsets,
                        int64_t* num_rows) {
    offsets[0] = *num_rows = 0;
    if (count <= 0) return;
    std::vector<int64_t> order((size_t)count), rows((size_t)count);
    counting_sort(
        count, capacity, [=](int64_t i) { return capacity - lengths[i]; },
        [&](int64_t k, int64_t i) { order[(size_t)k] = i; });
    *num_rows = best_fit(count, lengths, order.data(), capacity, rows.data());
    if (next_fit(count, lengths, capacity, nullptr) < *num_rows) {
        std::vector<int64_t> simple((size_t)count);
        *num_rows = next_fit(count, lengths, capacity, simple.data());
        for (int64_t i = 0; i < count; ++i) rows[(size_t)i] = simple[(size_t)order[(size_t)i]];
    }
    counting_sort(
        count, *num_rows, [&](int64_t i) { return rows[(size_t)i]; },
        [&](int64_t k, int64_t i) { documents[k] = order[(size_t)i]; });
    std::fill(offsets, offsets + *num_rows + 1, 0);
    for (int64_t i = 0; i < count; ++i) ++offsets[rows[(size_t)i] + 1];
    for (int64_t row = 0; row < *num_rows; ++row) offsets[row + 1] += offsets[row];
}
