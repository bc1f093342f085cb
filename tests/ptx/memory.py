"""The memory of a launch: tensors, whose bounds hold, and a block's shared memory, with copies and products under way.

Rows are the accesses of single threads. A row begins at a multiple of its size, which the machine has checked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from tests.ptx.access_log import AccessLog
from tests.ptx.numbers import Array

_ALIGNMENT = 16
"""Of the widest access, in bytes."""


class _Storage:
    """One tensor's storage. What only is read needs no log, so that accesses wait for the first write."""

    def __init__(self, start: int, num_bytes: int) -> None:
        self.start, self.end = start, start + num_bytes
        self.first = start - start % _ALIGNMENT  # rows are counted from here
        length = -(-(self.end - self.first) // _ALIGNMENT) * _ALIGNMENT
        self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(self.first))
        self._log: AccessLog | None = None
        self._reads: list[tuple[Array, int, Array]] = []

    def read(self, rows: Array, size: int, code: Array) -> tuple[int, str] | None:
        if self._log is None:
            self._reads.append((rows, size, code))
            return None
        return self._log.read(rows, size, code)

    def write(self, rows: Array, data: Array, code: Array) -> tuple[int, str] | None:
        if self._log is None:
            self._log = AccessLog(self.bytes.size, copies=True)
            for read in self._reads:
                self._log.read(*read)
            self._reads.clear()
        wrong = self._log.write(rows, data.shape[1], code, self.bytes, data)
        lost = (self.bytes.reshape(-1, data.shape[1])[rows] != data).any(1)
        if wrong is None and lost.any():
            return int(np.argmax(lost)), "writes where another thread of its warp writes something else"
        return wrong


class GlobalMemory:
    """The tensors that a launch is given."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        found = {(one.data_ptr(), one.nbytes()) for one in (tensor.untyped_storage() for tensor in tensors)}
        self._storages = [_Storage(*bounds) for bounds in sorted(found) if bounds[1] > 0]
        self._starts = np.array([one.start for one in self._storages], np.uint64)

    def outside(self, addresses: Array, size: int) -> tuple[int, str] | None:
        """Returns the number of an address whose `size` bytes no tensor has, and where it lies; None where none is."""
        if not self._storages:
            return 0, "at an address, where the launch has no tensor"
        numbers = self._numbers(addresses)
        ends = np.array([one.end for one in self._storages], np.uint64)
        starts = self._starts[numbers]
        bad = (addresses < starts) | (addresses + np.uint64(size) > ends[numbers])
        if not bad.any():
            return None
        index = int(np.argmax(bad))
        storage = self._storages[int(numbers[index])]
        place = int(addresses[index]) - storage.start
        return index, f"at byte {place} of a tensor of {storage.end - storage.start} bytes"

    def _numbers(self, addresses: Array) -> Array:
        return np.maximum(np.searchsorted(self._starts, addresses, side="right") - 1, 0)

    def _parts(self, addresses: Array, size: int) -> Iterable[tuple[_Storage, Array | slice, Array]]:
        """Yields each storage with the positions of its addresses and their rows."""
        low, high = self._numbers(np.array([addresses.min(), addresses.max()]))
        if low == high:
            storage = self._storages[low]
            yield storage, slice(None), ((addresses - np.uint64(storage.first)) // np.uint64(size)).astype(np.int64)
            return
        numbers = self._numbers(addresses)
        for number in np.unique(numbers):
            storage, at = self._storages[number], np.nonzero(numbers == number)[0]
            yield storage, at, ((addresses[at] - np.uint64(storage.first)) // np.uint64(size)).astype(np.int64)

    def load(self, addresses: Array, size: int, code: Array) -> tuple[Array, tuple[int, str] | None]:
        """Returns bytes [K, size], and what is wrong with the order (`AccessLog`)."""
        found, wrong = np.empty((addresses.size, size), np.uint8), None
        for storage, at, rows in self._parts(addresses, size):
            wrong = _placed(storage.read(rows, size, code[at]), at) or wrong
            found[at] = storage.bytes.reshape(-1, size)[rows]
        return found, wrong

    def store(self, addresses: Array, data: Array, code: Array) -> tuple[int, str] | None:
        """Writes bytes [K, size]; returns what is wrong with the order."""
        size, wrong = data.shape[1], None
        for storage, at, rows in self._parts(addresses, size):
            wrong = _placed(storage.write(rows, data[at], code[at]), at) or wrong
        return wrong


def _placed(found: tuple[int, str] | None, at: Array | slice) -> tuple[int, str] | None:
    if found is None or isinstance(at, slice):
        return found
    return int(at[found[0]]), found[1]


@dataclass(slots=True)
class Copy:
    """What threads copy into shared memory, or read from it, without waiting.

    Args:
        lanes: of the threads.
        group: of each, which it commits and waits for.
        rows: of each, of `size` bytes.
    """

    lanes: Array
    group: Array
    rows: Array
    size: int


class SharedMemory:
    """The shared memory of several blocks, one behind the other, `stride` bytes apart."""

    def __init__(self, blocks: int, num_bytes: int) -> None:
        self.size = num_bytes
        self.stride = -(-max(num_bytes, 1) // 1024) * 1024  # the layouts of Hopper's products repeat after 1024 bytes
        length = blocks * self.stride
        self.bytes = np.zeros(length, np.uint8)
        self.log = AccessLog(length)
        self.written = np.zeros(length, bool)
        self.arriving = np.zeros(length, bool)
        """Asynchronous copies write here."""
        self.multiplied = np.zeros(length, np.int16)
        """The number of products that read here and have not been waited for."""
        self.unfenced = np.zeros(length, bool)
        """Written since the last fence.proxy.async, which Hopper's products need."""

    def load(self, addresses: Array, size: int, code: Array) -> tuple[Array, tuple[int, str] | None]:
        """Returns bytes [K, size], and what is wrong."""
        rows = addresses // size
        wrong = self.log.read(rows, size, code) or self._unready(rows, size)
        return self.bytes.reshape(-1, size)[rows], wrong

    def _unready(self, rows: Array, size: int) -> tuple[int, str] | None:
        for bad, what in (
            (self.arriving.reshape(-1, size)[rows], "reads what an asynchronous copy writes, which nobody waited for"),
            (~self.written.reshape(-1, size)[rows], "reads shared memory that was never written"),
        ):
            if bad.any():
                return int(np.argmax(bad.any(1))), what
        return None

    def store(self, addresses: Array, data: Array, code: Array) -> tuple[int, str] | None:
        """Writes bytes [K, size]; returns what is wrong."""
        size = data.shape[1]
        rows = addresses // size
        wrong = self.log.write(rows, size, code, self.bytes, data)
        for bad, what in (
            (self.arriving.reshape(-1, size)[rows], "writes where an asynchronous copy does, which nobody waited for"),
            (self.multiplied.reshape(-1, size)[rows] > 0, "writes what a product reads, which nobody waited for"),
        ):
            if bad.any():
                wrong = wrong or (int(np.argmax(bad.any(1))), what)
        self.written.reshape(-1, size)[rows] = True
        self.unfenced.reshape(-1, size)[rows] = True
        return wrong

    def arrive(self, copy: Copy, code: Array) -> tuple[int, str] | None:
        """Ends a copy: what has arrived is as if its threads wrote it now. Returns what is wrong."""
        self.arriving.reshape(-1, copy.size)[copy.rows] = False
        data = self.bytes.reshape(-1, copy.size)[copy.rows]
        return self.log.write(copy.rows, copy.size, code, self.bytes, data)
