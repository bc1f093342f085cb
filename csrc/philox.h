// Philox-4x32-10 (Salmon et al., SC 2011) as the source of dropout masks; the contract is that of
// triton_kernels/philox.py.
#pragma once

#include <cstdint>

namespace philox {

struct Stream {
    uint32_t seed, site, step;
};

// Eight keep-or-drop decisions a call, bit i of out[n] = lane i of block first_block + n.
void keep_bits(const Stream& stream, int64_t token, int64_t first_block, int64_t num_blocks, uint32_t threshold,
               uint8_t* out);

}  // namespace philox
