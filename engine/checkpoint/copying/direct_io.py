"""Direct I/O: reads and writes large files past the page cache, where the file system supports it.

A conversion reads every byte once and writes every byte once, often more of them than fit in memory. Through the page
cache the processor copies each byte, and other pages are evicted to make room; on a fast disk that takes longer
than the disk itself. Past it (O_DIRECT) the disk writes into, and reads from, memory of this process, in whole
sectors at aligned addresses. Bytes that the page cache already holds are taken from there. Where a file system does not
support it, and for the ends of a run that fill no sector, the page cache is used.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path

import numpy as np

from engine.errors import UserError
from engine.files import platforms
from engine.telemetry.processors import available_processors

BLOCK_BYTES = 4 << 20
"""Bytes handled at a time by each thread: large enough for a disk, small enough for a processor's cache."""

ALIGNMENT = 4096
"""Alignment of addresses, offsets and lengths; no disk in use asks for more."""

_FEWEST_BYTES = 1 << 20
"""Below, a run is left to the page cache: a direct write waits for the disk."""

_MAX_THREADS = 8
_SYNC_FILE_RANGE_WRITE = 2


def default_threads() -> int:
    """Returns two threads for each processor, since one often waits for the disk; up to a limit past which a disk
    gains nothing."""
    return max(2, min(_MAX_THREADS, 2 * available_processors()))


class Scratch:
    """Aligned memory of one thread, allocated once and used again."""

    def __init__(self) -> None:
        self._blocks: dict[str, memoryview] = {}

    def block(self, use: str, num_bytes: int = BLOCK_BYTES) -> memoryview:
        """Returns at least `num_bytes`, with room for alignment; contents are left over from before.

        Args:
            use: distinguishes blocks that are in use at the same time.
        """
        size = _round_up(num_bytes) + 2 * ALIGNMENT
        found = self._blocks.get(use)
        if found is None or len(found) < size:
            found = self._blocks[use] = memoryview(mmap.mmap(-1, size))
        return found


class ThreadScratch(threading.local):
    """A `Scratch` for each thread that asks."""

    def __init__(self) -> None:
        self.scratch = Scratch()


class RangeReader:
    """Bytes [offset, offset + length) of a file, from the first to the last.

    Raises:
        UserError: the file is shorter.
    """

    def __init__(self, path: Path, offset: int, length: int) -> None:
        self._path, self._position, self._end = path, offset, offset + length
        self._descriptor = os.open(path, os.O_RDONLY | platforms.CLOEXEC)
        self._is_direct = False
        try:
            if os.fstat(self._descriptor).st_size < self._end:
                raise UserError(f"{path} is shorter than its header says: copy it again.")
            if platforms.DIRECT and length >= _FEWEST_BYTES and not _is_cached(self._descriptor, self._end - 1):
                direct = open_direct(path, os.O_RDONLY)
                if direct is not None:
                    self._use(direct, is_direct=True)
        except BaseException:
            self.close()
            raise

    def read(self, length: int, memory: memoryview) -> memoryview:
        """Returns the next `length` bytes, in `memory` (of a `Scratch`), which has room for them."""
        assert self._position + length <= self._end, (self._path, self._position, length, self._end)
        first = self._position // ALIGNMENT * ALIGNMENT
        before, wanted = self._position - first, self._position - first + length
        view, got = memory[: _round_up(wanted)], 0
        while got < wanted:
            end = got + self._read_at(first + got, view[got:])
            if end < wanted:
                end = end // ALIGNMENT * ALIGNMENT  # where it was cut short: a direct read asks for whole sectors
                if end == got:
                    raise UserError(f"{self._path} became shorter while it was read: copy it again.")
            got = end
        self._position += length
        return view[before:wanted]

    def _read_at(self, offset: int, memory: memoryview) -> int:
        try:
            return platforms.read_at(self._descriptor, memory, offset)
        except OSError as error:
            if not self._is_direct or error.errno != errno.EINVAL:
                raise
        # the file system allows direct opens, but not direct reads
        self._use(os.open(self._path, os.O_RDONLY | platforms.CLOEXEC), is_direct=False)
        return platforms.read_at(self._descriptor, memory, offset)

    def _use(self, descriptor: int, *, is_direct: bool) -> None:
        os.close(self._descriptor)
        self._descriptor, self._is_direct = descriptor, is_direct

    def close(self) -> None:
        os.close(self._descriptor)


class RunWriter:
    """Writes bytes one after another into an open file, in whole blocks.

    Args:
        plain: descriptor of the file through the page cache.
        direct: one past it, or None where the file system has none (`open_direct`).
        offset: of the first byte in the file.
        length: number of bytes.
        memory: of a `Scratch`, for the bytes that are buffered.
    """

    def __init__(self, plain: int, direct: int | None, offset: int, length: int, memory: memoryview) -> None:
        self._plain, self._direct = plain, direct if length >= _FEWEST_BYTES else None
        self._memory, self._address = memory[:BLOCK_BYTES], _address(memory)
        self._first = offset // ALIGNMENT * ALIGNMENT  # of the file, where the memory's first byte goes
        self._begin = self._end = offset - self._first

    def write(self, block: memoryview) -> None:
        """Takes the next bytes; the block may be used again on return."""
        source, left = _address(block), len(block)
        while left:
            count = min(left, len(self._memory) - self._end)
            ctypes.memmove(self._address + self._end, source, count)
            self._end, source, left = self._end + count, source + count, left - count
            if self._end == len(self._memory):
                self.flush()

    def flush(self) -> None:
        """Writes the rest of the buffer; to be called after the last byte."""
        begin, end = self._begin, self._end
        first, last = min(_round_up(begin), end), max(end // ALIGNMENT * ALIGNMENT, begin)
        if self._direct is None or first >= last:
            self._write(self._plain, begin, end)
            _start_writeback(self._plain, self._first + begin, end - begin)
        else:
            self._write(self._plain, begin, first)
            self._write_direct(self._direct, first, last)
            self._write(self._plain, last, end)
        self._first += len(self._memory)
        self._begin = self._end = 0

    def _write(self, descriptor: int, begin: int, end: int) -> None:
        while begin < end:
            begin += platforms.write_at(descriptor, self._memory[begin:end], self._first + begin)

    def _write_direct(self, descriptor: int, begin: int, end: int) -> None:
        try:
            self._write(descriptor, begin, end)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._direct = None  # the file system allows direct opens, but not direct writes
            self._write(self._plain, begin, end)


@cache
def _sync_file_range() -> ctypes._NamedFuncPointer | None:
    """Returns Linux's sync_file_range; None elsewhere."""
    if not platforms.IS_LINUX:
        return None
    function = ctypes.CDLL(None, use_errno=True).sync_file_range
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


def _start_writeback(descriptor: int, offset: int, length: int) -> None:
    """Starts writing bytes [offset, offset + length) of an open file to the disk, without waiting for them.

    By default the system keeps written bytes in memory until there are many, and the flush at the end waits for all of
    them; started early, the disk works beside the processor. A hint: errors are ignored here, because the flush at the
    end reports them.
    """
    function = _sync_file_range()
    if function is not None:
        function(descriptor, offset, length, _SYNC_FILE_RANGE_WRITE)


def read_ahead(path: Path, ranges: Iterable[tuple[int, int]]) -> None:
    """Asks the system to read bytes (offset, length) of a file into the page cache, and returns at once."""
    _advise(path, [partial(platforms.read_soon, offset=offset, length=length) for offset, length in ranges])


def forget(path: Path) -> None:
    """Asks the system, where it supports this, to drop a file from the page cache, so that reads go to the disk."""
    _advise(path, [platforms.drop_cached])


def _advise(path: Path, hints: Iterable[Callable[[int], None]]) -> None:
    descriptor = os.open(path, os.O_RDONLY | platforms.CLOEXEC)
    try:
        for hint in hints:
            hint(descriptor)
    finally:
        os.close(descriptor)


def open_direct(path: Path, flags: int = os.O_WRONLY) -> int | None:
    """Returns a descriptor of an existing file past the page cache; None where that is not supported."""
    if not platforms.DIRECT:
        return None
    try:
        return os.open(path, flags | platforms.DIRECT | platforms.CLOEXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None


def _is_cached(descriptor: int, offset: int) -> bool:
    """Returns whether the page cache holds a byte of the file."""
    try:
        return os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EOPNOTSUPP):
            return False
        raise


def _round_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _address(memory: memoryview) -> int:
    """Returns the address of the first byte, of read-only memory too; 0 where there is none."""
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data) if len(memory) else 0
