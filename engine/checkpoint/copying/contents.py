"""The bytes of a tensor that is to be written, in blocks, so that a conversion's memory is a few blocks.

Bytes that are contiguous in stored files are passed on as they are read; a part of a tensor that is scattered over
rows is put together block by block (also `engine.checkpoint.copying.exchange`). Tensors that change on the way (a
merge) have a content of their own, elsewhere.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor

from engine.checkpoint.copying.direct_io import BLOCK_BYTES, RangeReader, Scratch
from engine.checkpoint.reader import TensorReader
from engine.checkpoint.reshard import Box, box_spec
from engine.checkpoint.safetensors_file import raw_bytes
from engine.errors import UserError
from engine.kernels.checksum import Checksum


class Content(ABC):
    """The bytes of a tensor to be stored, produced once and in order."""

    @abstractmethod
    def blocks(self, scratch: Scratch, unit: int = 1) -> Iterator[memoryview]:
        """Yields the bytes; each block is valid until the next is asked for.

        Args:
            scratch: memory to work in.
            unit: each block holds a multiple of this many bytes, such as a row's.
        """

    def facts(self) -> dict[str, Any]:
        """Returns JSON values about the content, known after the last block."""
        return {}


class FileRange(NamedTuple):
    """Bytes [offset, offset + length) of a file.

    Args:
        checksum: of exactly these bytes, where it is on record.
        refuse: raises about (found, recorded) checksums that differ, in the words of whose bytes these are.
    """

    path: Path
    offset: int
    length: int
    checksum: str | None = None
    refuse: Callable[[str, str], NoReturn] | None = None


class StoredBytes(Content):
    """Bytes of files that are copied unchanged.

    Args:
        runs: copied in order; one with a checksum is checked while it is copied.
    """

    def __init__(self, runs: Sequence[FileRange]) -> None:
        self._runs = runs

    def blocks(self, scratch: Scratch, unit: int = 1) -> Iterator[memoryview]:
        size = max(1, BLOCK_BYTES // unit) * unit
        for run in self._runs:
            if not run.length:
                continue
            with CheckedRange(run) as reading:
                for first in range(0, run.length, size):
                    yield reading.read(min(size, run.length - first), scratch.block("read", size))


class MemoryBytes(Content):
    """The bytes of a tensor in memory.

    Args:
        tensor: on the host.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def blocks(self, scratch: Scratch, unit: int = 1) -> Iterator[memoryview]:
        data, size = raw_bytes(self._tensor), max(1, BLOCK_BYTES // unit) * unit
        for first in range(0, len(data), size):
            yield data[first : first + size]


def content_checksum(content: Content, scratch: Scratch) -> str:
    """Reads all bytes of a content and returns their checksum."""
    found = Checksum()
    for block in content.blocks(scratch):
        found.update(block)
    return found.text()


class CheckedRange:
    """A run of bytes that is read from first to last and compared with its checksum at the end.

    Raises:
        UserError: the file is too short or, on leaving the `with` block without an exception, the bytes read do not
            have the recorded checksum.
    """

    def __init__(self, run: FileRange) -> None:
        self.run, self._found = run, Checksum()
        self._reader = RangeReader(run.path, run.offset, run.length)

    def read(self, length: int, memory: memoryview) -> memoryview:
        """Reads as `RangeReader.read` does."""
        block = self._reader.read(length, memory)
        if self.run.checksum is not None:
            self._found.update(block)
        return block

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.close()
        run = self.run
        if kind is None and run.checksum is not None and self._found.text() != run.checksum:
            if run.refuse is not None:
                run.refuse(self._found.text(), run.checksum)
            raise UserError(
                f"{run.path} is damaged: the piece at byte {run.offset} has checksum {self._found.text()}, "
                f"but {run.checksum} was written; use another checkpoint."
            )


class GatheredRows(Content):
    """A part of a tensor that no file holds in one run, read by rows.

    Args:
        source, name, box: which part of which tensor.
    """

    def __init__(self, source: TensorReader, name: str, box: Box) -> None:
        self._source, self._name, self._box = source, name, box

    def blocks(self, scratch: Scratch, unit: int = 1) -> Iterator[memoryview]:
        shape, dtype = self._source.shape(self._name), self._source.dtype(self._name)
        for start, stop in row_blocks(self._box.shape(shape), dtype.itemsize):
            part = rows_of(self._box, shape, start, stop)
            local_shape = part.shape(shape)
            out = block_tensor(scratch, "rows", dtype, local_shape)
            self._source.read(self._name, box_spec(shape, part), out=out)
            yield raw_bytes(out)


class Concatenated(Content):
    """Several contents concatenated: a matrix that holds them as its rows."""

    def __init__(self, members: Sequence[Content]) -> None:
        self._members = members

    def blocks(self, scratch: Scratch, unit: int = 1) -> Iterator[memoryview]:
        for member in self._members:
            yield from member.blocks(scratch, unit)

    def facts(self) -> dict[str, Any]:
        return {key: value for member in self._members for key, value in member.facts().items()}


def block_tensor(scratch: Scratch, use: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Returns a tensor in scratch memory."""
    size = math.prod(shape) * dtype.itemsize
    return torch.frombuffer(scratch.block(use, size), dtype=torch.uint8)[:size].view(dtype).view(shape)


def row_blocks(shape: tuple[int, ...], itemsize: int, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, int]]:
    """Yields (start, stop) of rows whose bytes fit a block; at least one row each."""
    if not shape:
        yield 0, 1
        return
    rows = max(1, block_bytes // (math.prod(shape[1:]) * itemsize))
    for start in range(0, shape[0], rows):
        yield start, min(start + rows, shape[0])


def rows_of(box: Box, shape: tuple[int, ...], start: int, stop: int) -> Box:
    """Returns the rows [start, stop) of a box of a tensor of `shape`, as a box of that tensor."""
    if not shape:
        return box
    (first, _), *others = box.ranges(shape)
    return Box.of(((first + start, first + stop), *others), shape)
