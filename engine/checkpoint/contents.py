"""The bytes of a tensor that is to be written, in blocks, so that a conversion's memory is a few blocks.

Bytes that lie one after another in stored files are handed out as they are mapped; a part of a tensor that is scattered
over rows is gathered block by block. What changes on the way (a merge) is a content of its own, elsewhere.
"""

from __future__ import annotations

import math
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.checkpoint.checksum import Checksum
from engine.checkpoint.reader import TensorReader
from engine.checkpoint.reshard import Box, Copy, box_spec, plan_copies
from engine.checkpoint.safetensors_file import raw_bytes
from engine.errors import UserError

BLOCK_BYTES = 4 << 20
"""Bytes handled at a time by each thread: large enough for a disk, small enough for a processor's cache."""

_AHEAD_BYTES = 32 << 20
_MAX_AHEAD = 256 << 20


class Content(ABC):
    """What a stored tensor will hold, produced once and in order."""

    @abstractmethod
    def blocks(self, buffer: Tensor) -> Iterator[memoryview]:
        """The bytes; each block is valid until the next is asked for.

        Args:
            buffer: uint8 [BLOCK_BYTES] of scratch memory.
        """

    def facts(self) -> dict[str, Any]:
        """JSON values about the content, known after the last block."""
        return {}


class Run(NamedTuple):
    """Bytes [offset, offset + length) of a file.

    Args:
        checksum: of exactly these bytes, where it is on record.
    """

    path: Path
    offset: int
    length: int
    checksum: str | None = None


class StoredBytes(Content):
    """Bytes that are copied as they are.

    Args:
        runs: copied one after another.
        check: called before the first byte is read; raises where what is stored is damaged.
    """

    def __init__(self, runs: Sequence[Run], check: Callable[[], None] | None = None) -> None:
        self._runs, self._check = runs, check

    def blocks(self, buffer: Tensor) -> Iterator[memoryview]:
        if self._check is not None:
            self._check()
        for run in self._runs:
            if run.length:
                yield from _read_run(run)


def read_ahead(path: Path, offset: int, length: int) -> None:
    """Asks the system to read bytes of a file while something else is done."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, offset, min(length, _MAX_AHEAD), os.POSIX_FADV_WILLNEED)
    finally:
        os.close(descriptor)


def _read_run(run: Run) -> Iterator[memoryview]:
    """The bytes as they lie in the system's memory: mapped, so that they are copied once, into the file written."""
    found = Checksum()
    with open(run.path, "rb") as file:
        descriptor = file.fileno()
        if os.fstat(descriptor).st_size < run.offset + run.length:
            raise UserError(f"{run.path} is shorter than its header says: copy it again.")
        before = run.offset % mmap.ALLOCATIONGRANULARITY
        # a private mapping can be handed to torch, which takes no read-only memory; nothing is written to it
        mapped = mmap.mmap(descriptor, before + run.length, access=mmap.ACCESS_COPY, offset=run.offset - before)
        data, done, ahead = memoryview(mapped)[before:], 0, 0
        while done < run.length:
            if ahead < done + _AHEAD_BYTES and ahead < run.length:
                os.posix_fadvise(descriptor, run.offset + ahead, _AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
                ahead += _AHEAD_BYTES
            block = data[done : done + BLOCK_BYTES]
            if run.checksum is not None:
                found.update(block)
            yield block
            done += len(block)
    if run.checksum is not None and found.text() != run.checksum:
        raise UserError(
            f"{run.path} is damaged: the piece at byte {run.offset} has checksum {found.text()}, "
            f"but {run.checksum} was written; use another checkpoint."
        )


class GatheredRows(Content):
    """A part of a tensor that is not contiguous where it is stored, gathered by rows.

    Args:
        source, name, box: which part of which tensor.
        check: as in `StoredBytes`.
    """

    def __init__(self, source: TensorReader, name: str, box: Box, check: Callable[[], None] | None = None) -> None:
        self._source, self._name, self._box, self._check = source, name, box, check

    def blocks(self, buffer: Tensor) -> Iterator[memoryview]:
        if self._check is not None:
            self._check()
        shape, dtype = self._source.shape(self._name), self._source.dtype(self._name)
        for start, stop in row_blocks(self._box.shape(shape), dtype.itemsize):
            part = rows_of(self._box, shape, start, stop)
            local_shape = part.shape(shape)
            out = block_tensor(buffer, dtype, local_shape)
            self._source.read(self._name, box_spec(shape, part), out=out)
            yield raw_bytes(out)


class Joined(Content):
    """Contents one after another: a matrix that holds several as its rows."""

    def __init__(self, members: Sequence[Content]) -> None:
        self._members = members

    def blocks(self, buffer: Tensor) -> Iterator[memoryview]:
        for member in self._members:
            yield from member.blocks(buffer)

    def facts(self) -> dict[str, Any]:
        return {key: value for member in self._members for key, value in member.facts().items()}


def block_tensor(buffer: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor in the scratch memory, or in memory of its own where a single row is larger than that."""
    size = math.prod(shape) * dtype.itemsize
    if size > buffer.numel():
        return torch.empty(shape, dtype=dtype)
    return buffer[:size].view(dtype).view(shape)


def row_blocks(shape: tuple[int, ...], itemsize: int, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, int]]:
    """(start, stop) of rows whose bytes fit a block; at least one row each."""
    if not shape:
        yield 0, 1
        return
    rows = max(1, block_bytes // (math.prod(shape[1:]) * itemsize))
    for start in range(0, shape[0], rows):
        yield start, min(start + rows, shape[0])


def rows_of(box: Box, shape: tuple[int, ...], start: int, stop: int) -> Box:
    """Rows [start, stop) of a box of a tensor of `shape`, as a box of that tensor."""
    if not shape:
        return box
    ranges = list(box.ranges(shape))
    ranges[0] = (ranges[0][0] + start, ranges[0][0] + stop)
    runs = [(dim, first, last - first) for dim, (first, last) in enumerate(ranges) if (first, last) != (0, shape[dim])]
    return Box(*runs[0], tuple(runs[1:])) if runs else Box()


class PlacedCopy(NamedTuple):
    """A run of a wanted box that is contiguous in a stored piece: elements from `first` of piece `source`."""

    source: int
    first: int
    num_elements: int
    is_whole: bool


def contiguous_copies(shape: tuple[int, ...], box: Box, stored: Sequence[Box]) -> list[PlacedCopy] | None:
    """The runs that make up `box` one after another, or None where it is scattered in the stored pieces."""
    local_shape = box.shape(shape)
    placed = []
    for copy in plan_copies(box_spec(shape, box), stored):
        stored_shape = stored[copy.source].shape(shape)
        if not _is_run(copy.source_slices, stored_shape) or not _is_run(copy.local_slices, local_shape):
            return None
        place = PlacedCopy(
            source=copy.source,
            first=_first(copy.source_slices, stored_shape),
            num_elements=copy.num_elements,
            is_whole=copy.num_elements == math.prod(stored_shape),
        )
        placed.append((_first(copy.local_slices, local_shape), place))
    return [place for _, place in sorted(placed)]


def touched(shape: tuple[int, ...], box: Box, stored: Sequence[Box]) -> list[Copy]:
    """The copies out of stored pieces that a box needs."""
    return plan_copies(box_spec(shape, box), stored)


def _is_run(slices: tuple[slice, ...], shape: tuple[int, ...]) -> bool:
    """Whether the elements lie one after another in a row-major tensor."""
    lengths = [part.stop - part.start for part in slices]
    partial = [dim for dim, length in enumerate(lengths) if length != shape[dim]]
    return not partial or all(length == 1 for length in lengths[: partial[-1]])


def _first(slices: tuple[slice, ...], shape: tuple[int, ...]) -> int:
    return sum(part.start * math.prod(shape[dim + 1 :]) for dim, part in enumerate(slices))
