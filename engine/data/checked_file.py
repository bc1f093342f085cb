"""A mapped file of integers that is checked as it is read: each block is compared with its checksum, and each value
with its legal range, when it is first used.

A row of a few thousand tokens is in one or two blocks, so checking costs next to nothing beside reading, a store
of any size opens at once, and damage ends the run before it is trained on, with the file and place named.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.errors import UserError
from engine.kernels.checksum import crc32c

BLOCK_BYTES = 64 << 10
"""Bytes of a file that one checksum covers."""
_CHUNK_BYTES = 16 << 20


class CheckedFile:
    """The numbers of a file, read by slices.

    Args:
        path: of the file, as long as `count` numbers are.
        dtype: of the file.
        count: numbers in it.
        most: the largest legal value; the smallest is 0.
        sums: uint32 [blocks], CRC-32C of each `BLOCK_BYTES`; None where the file has been checked as a whole, or
            nothing is on record.
        shown_as: dtype of the slices, of the same size; None for `dtype`.

    Raises:
        UserError: the file is missing, or of another size.
    """

    def __init__(
        self,
        path: Path,
        dtype: type,
        count: int,
        *,
        most: int,
        sums: NDArray[np.uint32] | None = None,
        shown_as: type | None = None,
    ) -> None:
        self.path, self._most, self._sums = path, most, sums
        self._values = mapped(path, dtype, count)
        self._bytes = self._values.view(np.uint8)
        self._shown_as = np.dtype(shown_as or dtype)
        self._seen = np.zeros(num_blocks(len(self._bytes)), dtype=bool)
        assert sums is None or len(sums) == len(self._seen), (path, len(sums), len(self._seen))

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, span: slice) -> NDArray:
        """Returns the numbers [start, stop), a view of the file.

        Raises:
            UserError: the file is damaged there.
        """
        start, stop, step = span.indices(len(self))
        assert step == 1 and start < stop, span
        itemsize = self._values.itemsize
        self._check_blocks(start * itemsize // BLOCK_BYTES, (stop * itemsize - 1) // BLOCK_BYTES + 1)
        values = self._values[start:stop]
        if int(values.max()) > self._most or int(values.min()) < 0:
            self._refuse_value(start, values)
        return values.view(self._shown_as)

    def whole(self) -> NDArray:
        """Returns all numbers, read a part at a time."""
        step = _CHUNK_BYTES // self._values.itemsize
        for start in range(0, len(self), step):
            self[start : start + step]
        return self._values.view(self._shown_as)

    def _check_blocks(self, first: int, last: int) -> None:
        if self._sums is None or self._seen[first:last].all():
            return
        for block in range(first, last):
            if not self._seen[block]:
                data = memoryview(self._bytes[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])
                if (found := crc32c(data)) != self._sums[block]:
                    begin = block * BLOCK_BYTES
                    raise UserError(
                        f"{self.path} is damaged: bytes {begin} to {begin + len(data)} have checksum {found:08x}, but "
                        f"{self._sums[block]:08x} was written; copy it again, or tokenise the data again."
                    )
                self._seen[block] = True

    def _refuse_value(self, start: int, values: NDArray) -> None:
        place = int(np.flatnonzero((values > self._most) | (values < 0))[0])
        raise UserError(
            f"{self.path} has {int(values[place])} at place {start + place}, but 0 to {self._most} are possible: it is "
            "damaged or was made for something else; copy it again, or tokenise the data again."
        )


def num_blocks(num_bytes: int) -> int:
    """Returns the number of blocks of a file with this many bytes."""
    return -(-num_bytes // BLOCK_BYTES)


def file_checksum(data: NDArray) -> str:
    """Returns the CRC-32C of an array's bytes, eight hexadecimal digits."""
    flat, value = data.reshape(-1).view(np.uint8), 0
    for start in range(0, len(flat), _CHUNK_BYTES):
        value = crc32c(memoryview(flat[start : start + _CHUNK_BYTES]), value)
    return f"{value:08x}"


def mapped(path: Path, dtype: type, count: int) -> NDArray:
    """Returns the numbers of a file, which stays on disk.

    Raises:
        UserError: the file is missing, or of another size.
    """
    expected = count * np.dtype(dtype).itemsize
    size = path.stat().st_size if path.is_file() else None
    if size != expected:
        found = "is missing" if size is None else f"has {size} bytes"
        raise UserError(f"{path} {found}, expected {expected} bytes: copy it again, or tokenise the data again.")
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,)) if count else np.empty(0, dtype=dtype)


class BlockSums:
    """Computes the checksums of a file's blocks from its bytes as they are written."""

    def __init__(self) -> None:
        self._sums: list[int] = []
        self._value, self._filled = 0, 0

    def update(self, data: memoryview) -> None:
        """Adds contiguous bytes, format "B"."""
        while data:
            part = data[: BLOCK_BYTES - self._filled]
            self._value, self._filled = crc32c(part, self._value), self._filled + len(part)
            data = data[len(part) :]
            if self._filled == BLOCK_BYTES:
                self._close()

    def finish(self) -> NDArray[np.uint32]:
        """Returns the sums of all blocks; the last one may be short."""
        if self._filled:
            self._close()
        return np.array(self._sums, dtype=np.uint32)

    def _close(self) -> None:
        self._sums.append(self._value)
        self._value = self._filled = 0
