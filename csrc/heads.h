// Heads of a matrix of tokens.
#pragma once

#include <cstdint>

namespace heads {

// [tokens, heads, dim] with any distance between tokens and between heads.
template <class T>
struct Heads {
    T* data;
    int64_t token, head;
    T* at(int64_t t, int64_t h) const { return data + t * token + h * head; }
};

}  // namespace heads
