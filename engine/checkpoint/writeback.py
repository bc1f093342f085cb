"""Bytes on their way to the disk while a file is still being written.

Left alone, the system keeps what is written in memory until there is much of it, and the flush at the end waits for all
of that. Asked early, the disk works beside the processor.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

_SYNC_FILE_RANGE_WRITE = 2


@cache
def _sync_file_range() -> ctypes._NamedFuncPointer | None:
    """Linux's call; None elsewhere."""
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None, use_errno=True).sync_file_range
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


def start_writeback(descriptor: int, offset: int, length: int) -> None:
    """Starts writing bytes [offset, offset + length) of an open file to the disk, without waiting for them.

    A hint: what it reports is left to the flush at the end, which says the same.
    """
    function = _sync_file_range()
    if function is not None:
        function(descriptor, offset, length, _SYNC_FILE_RANGE_WRITE)
