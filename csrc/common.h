// What every kernel shares: the C calling convention, and loops whose result does not depend on the number of threads.
//
// Conventions of all launchers: raw pointers; those to `void` are to numbers of the launcher's `type` (simd.h: fp32 or
// bfloat16), the others to fp32 unless said otherwise; `ld_*` is the distance between rows, in
// elements (bytes for packed bits); sizes and offsets are 64-bit; pointers may be null where the text says so; sizes
// may be 0. The first argument is the number of threads.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

// A launcher that takes its arguments from an array too, as calls that are repeated have them (replay.cpp): numbers and
// pointers in 64 bits each, floating-point ones as the bits of a double.
#define REPLAYED(launcher) \
    EXPORT void launcher##_words(const int64_t* words) { common::call(launcher, words); }

namespace common {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Calls work(item) for each item. What an item is must not depend on `threads`, and items must not share a sum: then
// the result does not depend on who runs them.
template <class Work>
inline void parallel_for(int threads, int64_t items, Work work) {
    if (threads <= 1 || items <= 1) {
        for (int64_t item = 0; item < items; ++item) work(item);
        return;
    }
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t item = 0; item < items; ++item) work(item);
}

// Memory of this thread for one call of a work function, 64-byte aligned; contents are left over from earlier calls.
// `slot` tells apart buffers that are alive together.
template <int slot = 0>
inline float* scratch(int64_t floats) {
    static thread_local std::vector<float> memory;
    if ((int64_t)memory.size() < floats + 16) memory.resize(floats + 16);
    return (float*)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
}

template <class T>
T from_word(int64_t word) {
    if constexpr (std::is_floating_point<T>::value) {
        double value;
        memcpy(&value, &word, sizeof value);
        return (T)value;
    } else {
        return (T)word;
    }
}

template <class... T, size_t... I>
void call_with(void (*launcher)(T...), const int64_t* words, std::index_sequence<I...>) {
    launcher(from_word<T>(words[I])...);
}

template <class... T>
void call(void (*launcher)(T...), const int64_t* words) {
    call_with(launcher, words, std::index_sequence_for<T...>());
}

}  // namespace common
