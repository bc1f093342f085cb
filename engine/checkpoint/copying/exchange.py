"""Parts of a tensor made from its stored pieces in one pass: every stored byte is read and checked once.

Stored pieces and wanted parts are boxes of one tensor, split along any of its dimensions. The rows of the tensor are
processed in order, a block at a time, so every piece and every part sees its own bytes in order too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from engine.checkpoint.copying.contents import BLOCK_BYTES, CheckedRange, Content, FileRange, block_tensor
from engine.checkpoint.copying.direct_io import Scratch
from engine.checkpoint.reshard import Box
from engine.checkpoint.safetensors_file import raw_bytes
from engine.kernels.checksum import Checksum, joined_checksum

_Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPiece:
    """A piece of a tensor, row-major.

    Args:
        box: which part of the tensor.
        run: where its bytes are.
    """

    box: Box
    run: FileRange


class Exchange:
    """Parts of one tensor, made together from its stored pieces.

    Args:
        shape, dtype: of the tensor.
        stored: pieces that cover it.
        wanted: the parts.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, stored: Sequence[StoredPiece], wanted: Sequence[Box]
    ) -> None:
        # a number is a vector of one
        self._shape, self._dtype = shape or (1,), dtype
        self._stored = [(_ranges(piece.box, shape), piece.run) for piece in stored]
        self._wanted = [_ranges(box, shape) for box in wanted]
        self.checksum: str | None = None
        """Checksum of the whole tensor, once all of it has been read."""

    def part(self, index: int) -> ExchangedPart:
        """Returns the content of a wanted part."""
        return ExchangedPart(self, index)

    def blocks(self, parts: Sequence[int], scratch: Scratch) -> Iterator[tuple[int, memoryview]]:
        """Yields (part, its next bytes) for the parts asked for; a block is valid until the next is asked for.

        All of every stored piece that they touch is read, and compared with its checksum.

        Raises:
            UserError: a piece is damaged.
        """
        used = [each for each in self._stored if any(_meet(each[0], self._wanted[part]) for part in parts)]
        is_whole, whole = len(used) == len(self._stored), Checksum()
        with ExitStack() as stack:
            runs = [stack.enter_context(CheckedRange(run)) for _, run in used]
            for first, last in self._row_blocks([ranges for ranges, _ in used], parts):
                present = [
                    (ranges, run) for (ranges, _), run in zip(used, runs, strict=True) if _covers(ranges, first, last)
                ]
                rows = self._read_rows(present, first, last, scratch)
                if is_whole:
                    whole.update(raw_bytes(rows))
                for part in parts:
                    if _covers(self._wanted[part], first, last):
                        yield part, raw_bytes(self._part_of(rows, self._wanted[part], scratch))
        if is_whole:
            self.checksum = whole.text()

    def _row_blocks(self, used: Sequence[_Ranges], parts: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yields the rows (first, last) that each piece and each part has either all or none of, in blocks."""
        row_bytes = math.prod(self._shape[1:]) * self._dtype.itemsize
        step = max(1, BLOCK_BYTES // max(1, row_bytes))
        cuts = sorted({cut for ranges in (*used, *(self._wanted[part] for part in parts)) for cut in ranges[0]})
        for begin, end in pairwise(cuts):
            if any(_covers(ranges, begin, end) for ranges in used):
                for first in range(begin, end, step):
                    yield first, min(first + step, end)

    def _read_rows(
        self, present: Sequence[tuple[_Ranges, CheckedRange]], first: int, last: int, scratch: Scratch
    ) -> Tensor:
        """Returns the rows of the tensor, from the pieces that have some of their columns; other columns hold
        anything.
        """
        whole = (last - first, *self._shape[1:])
        rows = None
        for place, (ranges, run) in enumerate(present):
            local = (last - first, *(stop - start for start, stop in ranges[1:]))
            size = math.prod(local) * self._dtype.itemsize
            if not size:
                continue
            data = run.read(size, scratch.block(f"piece {place}", size))
            piece = torch.frombuffer(data, dtype=self._dtype).view(local)
            if local == whole:
                return piece
            if rows is None:
                rows = block_tensor(scratch, "rows", self._dtype, whole)
            rows[_columns(ranges)].copy_(piece)
        return torch.empty(whole, dtype=self._dtype) if rows is None else rows

    def _part_of(self, rows: Tensor, ranges: _Ranges, scratch: Scratch) -> Tensor:
        part = rows[_columns(ranges)]
        if part.is_contiguous():
            return part
        return block_tensor(scratch, "part", self._dtype, tuple(part.shape)).copy_(part)


class ExchangedPart(Content):
    """One part of an exchange; making several together, by `Exchange.blocks`, is faster."""

    def __init__(self, exchange: Exchange, index: int) -> None:
        self.exchange, self.index = exchange, index

    def blocks(self, scratch: Scratch, unit: int = 1) -> Iterator[memoryview]:
        for _, block in self.exchange.blocks((self.index,), scratch):
            yield block


def whole_checksum(shape: tuple[int, ...], dtype: torch.dtype, parts: Sequence[tuple[Box, str, Content]]) -> str | None:
    """Returns the checksum of a tensor from those of its parts, or from the exchange that they were made by.

    Args:
        parts: box, checksum and content of each; together they are the tensor.

    Returns:
        None where the parts are not contiguous and no exchange has read all of the tensor.
    """
    for _, _, content in parts:
        if isinstance(content, ExchangedPart) and content.exchange.checksum is not None:
            return content.exchange.checksum
    if any(box.dim not in (None, 0) or box.others for box, _, _ in parts):
        return None
    rows = sorted((box.offset, math.prod(box.shape(shape)) * dtype.itemsize, found) for box, found, _ in parts)
    return joined_checksum((found, num_bytes) for _, num_bytes, found in rows)


def _ranges(box: Box, shape: tuple[int, ...]) -> _Ranges:
    return box.ranges(shape) or ((0, 1),)


def _columns(ranges: _Ranges) -> tuple[slice, ...]:
    return (slice(None), *(slice(start, stop) for start, stop in ranges[1:]))


def _covers(ranges: _Ranges, first: int, last: int) -> bool:
    """Returns whether a box has rows [first, last), of which it has all or none."""
    start, stop = ranges[0]
    return start <= first and last <= stop


def _meet(one: _Ranges, other: _Ranges) -> bool:
    return all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in zip(one, other, strict=True))
