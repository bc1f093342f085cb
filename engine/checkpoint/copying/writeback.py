"""Early writeback: starts writing a file's bytes to the disk while the file is still being written.

By default the system keeps written bytes in memory until there are many, and the flush at the end waits for all of
them. Started early, the disk works beside the processor.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

_SYNC_FILE_RANGE_WRITE = 2


@cache
def _sync_file_range() -> ctypes._NamedFuncPointer | None:
    """Returns Linux's sync_file_range; None elsewhere."""
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None, use_errno=True).sync_file_range
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


def start_writeback(descriptor: int, offset: int, length: int) -> None:
    """Starts writing bytes [offset, offset + length) of an open file to the disk, without waiting for them.

    A hint: errors are ignored here, because the flush at the end reports them.
    """
    function = _sync_file_range()
    if function is not None:
        function(descriptor, offset, length, _SYNC_FILE_RANGE_WRITE)
