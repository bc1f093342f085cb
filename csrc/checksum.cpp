// CRC-32C (Castagnoli, reflected polynomial 0x82F63B78): what tells a damaged piece of a checkpoint from a whole one.
//
// On x86 the processor's own instruction, in three streams, because it takes three cycles and can start every cycle.
// Elsewhere eight tables, eight bytes at a time. Both give the same number, whatever the alignment.
#include <cstring>

#include "common.h"

namespace {

constexpr uint32_t POLYNOMIAL = 0x82F63B78u;

struct Tables {
    uint32_t byte[8][256];
    Tables() {
        for (uint32_t i = 0; i < 256; ++i) {
            uint32_t value = i;
            for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ (value & 1 ? POLYNOMIAL : 0);
            byte[0][i] = value;
        }
        for (int place = 1; place < 8; ++place)
            for (uint32_t i = 0; i < 256; ++i)
                byte[place][i] = byte[place - 1][i] >> 8 ^ byte[0][byte[place - 1][i] & 255];
    }
};

const Tables& tables() {
    static const Tables made;
    return made;
}

inline uint32_t one_byte(uint32_t value, uint8_t next) { return value >> 8 ^ tables().byte[0][(value ^ next) & 255]; }

// The register, without the inversions at both ends, after `bytes` more bytes.
uint32_t by_tables(uint32_t value, const uint8_t* data, int64_t bytes) {
    const Tables& t = tables();
    for (; bytes >= 8; bytes -= 8, data += 8) {
        const uint32_t low = value ^ ((uint32_t)data[0] | (uint32_t)data[1] << 8 | (uint32_t)data[2] << 16 |
                                      (uint32_t)data[3] << 24);
        value = t.byte[7][low & 255] ^ t.byte[6][low >> 8 & 255] ^ t.byte[5][low >> 16 & 255] ^ t.byte[4][low >> 24] ^
                t.byte[3][data[4]] ^ t.byte[2][data[5]] ^ t.byte[1][data[6]] ^ t.byte[0][data[7]];
    }
    for (; bytes > 0; --bytes) value = one_byte(value, *data++);
    return value;
}

#if defined(__x86_64__)

constexpr int64_t STREAM = 4096;

// What STREAM zero bytes make of a register: linear in its bits, so a table for each of its bytes.
struct Shift {
    uint32_t byte[4][256];
    Shift() {
        uint32_t basis[32];
        const uint8_t zeros[STREAM] = {};
        for (int bit = 0; bit < 32; ++bit) basis[bit] = by_tables(1u << bit, zeros, STREAM);
        for (int place = 0; place < 4; ++place)
            for (uint32_t i = 0; i < 256; ++i) {
                byte[place][i] = 0;
                for (int bit = 0; bit < 8; ++bit)
                    if (i >> bit & 1) byte[place][i] ^= basis[8 * place + bit];
            }
    }
    uint32_t operator()(uint32_t value) const {
        return byte[0][value & 255] ^ byte[1][value >> 8 & 255] ^ byte[2][value >> 16 & 255] ^ byte[3][value >> 24];
    }
};

inline uint64_t word(const uint8_t* data) {
    uint64_t value;
    std::memcpy(&value, data, 8);
    return value;
}

__attribute__((target("sse4.2"))) uint32_t by_instruction(uint32_t value, const uint8_t* data, int64_t bytes) {
    static const Shift shift;
    for (; bytes >= 3 * STREAM; bytes -= 3 * STREAM, data += 3 * STREAM) {
        uint64_t first = value, second = 0, third = 0;
        for (int64_t at = 0; at < STREAM; at += 8) {
            first = __builtin_ia32_crc32di(first, word(data + at));
            second = __builtin_ia32_crc32di(second, word(data + STREAM + at));
            third = __builtin_ia32_crc32di(third, word(data + 2 * STREAM + at));
        }
        value = shift(shift((uint32_t)first) ^ (uint32_t)second) ^ (uint32_t)third;
    }
    uint64_t rest = value;
    for (; bytes >= 8; bytes -= 8, data += 8) rest = __builtin_ia32_crc32di(rest, word(data));
    for (; bytes > 0; --bytes) rest = __builtin_ia32_crc32qi((uint32_t)rest, *data++);
    return (uint32_t)rest;
}

#endif

}  // namespace

// value: the checksum of what came before (0 at the start), replaced by that of all. One thread.
EXPORT void engine_crc32c(int64_t bytes, const uint8_t* data, uint32_t* value) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("sse4.2")) {
        *value = ~by_instruction(~*value, data, bytes);
        return;
    }
#endif
    *value = ~by_tables(~*value, data, bytes);
}

// The same by tables, whatever the processor has; so that both ways can be compared.
EXPORT void engine_crc32c_by_tables(int64_t bytes, const uint8_t* data, uint32_t* value) {
    *value = ~by_tables(~*value, data, bytes);
}
