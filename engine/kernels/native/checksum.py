"""CRC-32C of bytes by the compiled code. Releases the interpreter's lock, so that other threads run meanwhile."""

from __future__ import annotations

import ctypes

import numpy as np

from engine.kernels.native.loader import library


def crc32c(data: memoryview, value: int = 0, *, by_tables: bool = False) -> int:
    """Returns the checksum of `data` after bytes whose checksum is `value`; arguments as those of zlib.crc32.

    Args:
        data: contiguous bytes.
        by_tables: without the processor's instruction; for comparison.
    """
    array = np.frombuffer(data, dtype=np.uint8)
    result = ctypes.c_uint32(value)
    function = library().engine_crc32c_by_tables if by_tables else library().engine_crc32c
    function(array.size, array.ctypes.data, ctypes.addressof(result))
    return int(result.value)
