"""CRC-32C, the checksum of everything that is stored: by the compiled code where there is any, else by numpy.

Both give the same digits, so one machine verifies another's files. The compiled code runs about as fast as memory is
read; numpy's is slower by more than an order of magnitude and holds the interpreter's lock between its operations.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from engine.kernels.native import checksum as native
from engine.kernels.native.loader import native_status

ALGORITHM = "crc32c"
"""The checksum's name in manifests."""

_POLYNOMIAL = 0x82F63B78
_LANE_BYTES = 1024
_LANES = 4096

Words = NDArray[np.uint32]


def crc32c(data: memoryview, value: int = 0) -> int:
    """Returns the CRC-32C of `data` after bytes whose checksum is `value`.

    Args:
        data: contiguous bytes, format "B".
    """
    return native.crc32c(data, value) if native_status().available else crc32c_by_numpy(data, value)


def slow_checksums() -> str | None:
    """Returns a warning that checksums are slow here, and why; None where they are not."""
    status = native_status()
    if status.available:
        return None
    return f"{status.reason.rstrip('.')}: checksums are computed by numpy, several times slower."


class Checksum:
    """Accumulates the checksum of bytes that come in parts."""

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: memoryview) -> None:
        """Adds contiguous bytes, format "B"."""
        self._value = crc32c(data, self._value)

    def text(self) -> str:
        """Returns the checksum of all bytes so far as eight hexadecimal digits, as manifests have it."""
        return f"{self._value:08x}"


def checksum_of(data: bytes | memoryview) -> str:
    """Returns the checksum of contiguous bytes, format "B", as eight hexadecimal digits."""
    return f"{crc32c(memoryview(data)):08x}"


def joined_checksum(parts: Iterable[tuple[str, int]]) -> str:
    """Returns the checksum of concatenated bytes, from (checksum, number of bytes) of each part."""
    value = 0
    for text, num_bytes in parts:
        for power in range(num_bytes.bit_length()):
            if num_bytes >> power & 1:
                value = _times(_zero_bytes(power), value)
        value ^= int(text, 16)
    return f"{value:08x}"


@cache
def _zero_bytes(power: int) -> tuple[int, ...]:
    """Returns the effect of 2**power zero bytes on each bit of a register: a 32x32 matrix over two elements."""
    if power == 0:
        return tuple(int(_after_zero_bytes(np.array([1 << bit], dtype=np.uint32), 1)[0]) for bit in range(32))
    half = _zero_bytes(power - 1)
    return tuple(_times(half, column) for column in half)


def _times(matrix: tuple[int, ...], register: int) -> int:
    result = 0
    for bit, column in enumerate(matrix):
        if register >> bit & 1:
            result ^= column
    return result


def crc32c_by_numpy(data: memoryview, value: int = 0) -> int:
    """Computes `crc32c` without compiled code: 4096 stretches of 1 KiB side by side, then joined."""
    register = ~value & 0xFFFFFFFF
    array = np.frombuffer(data, dtype=np.uint8)
    whole = array.size // _LANE_BYTES
    for first in range(0, whole, _LANES):
        stretch = array[first * _LANE_BYTES : min(first + _LANES, whole) * _LANE_BYTES]
        register = _join(register, _lanes(stretch.view("<u4").reshape(-1, _LANE_BYTES // 4)))
    table = _byte_table()
    for byte in array[whole * _LANE_BYTES :].tolist():
        register = int(table[(register ^ byte) & 255]) ^ register >> 8
    return ~register & 0xFFFFFFFF


def _lanes(words: Words) -> Words:
    """Returns the final register of each row, started from 0."""
    low, high = _half_tables()
    registers = np.zeros(len(words), dtype=np.uint32)
    for column in np.ascontiguousarray(words.T):
        registers ^= column
        registers = low[registers & 0xFFFF] ^ high[registers >> 16]
    return registers


def _join(register: int, lanes: Words) -> int:
    tables = _shift_tables()
    for lane in lanes.tolist():
        shifted = tables[0][register & 255] ^ tables[1][register >> 8 & 255]
        register = shifted ^ tables[2][register >> 16 & 255] ^ tables[3][register >> 24] ^ lane
    return register


@cache
def _byte_table() -> Words:
    """Returns the effect of eight more zero bits on each byte."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, table >> 1 ^ np.uint32(_POLYNOMIAL), table >> 1).astype(np.uint32)
    return table


def _after_zero_bytes(registers: Words, count: int) -> Words:
    table = _byte_table()
    for _ in range(count):
        registers = table[registers & 255] ^ registers >> 8
    return registers


@cache
def _half_tables() -> tuple[Words, Words]:
    """Returns the effect of four zero bytes on each lower and each upper half of a register."""
    halves = np.arange(1 << 16, dtype=np.uint32)
    return _after_zero_bytes(halves, 4), _after_zero_bytes(halves << np.uint32(16), 4)


@cache
def _shift_tables() -> list[list[int]]:
    """Returns the effect of a lane of zero bytes on each byte of a register, by the byte's place."""
    places = (np.arange(256, dtype=np.uint32) << np.uint32(shift) for shift in (0, 8, 16, 24))
    return [_after_zero_bytes(values, _LANE_BYTES).tolist() for values in places]
