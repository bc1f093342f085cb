"""A spelling: the tensors in which a library stores a matrix in few bits, and how they become the parts of a format.

A stored tensor lies along the rows of the matrix, along its columns, along both or neither, one index to so many of
them: `Layout` says so, and a shard reads no more of the tensor than that. `load` and `store` are each other's reverse.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from engine.errors import UserError
from engine.kernels.codec import PLAIN
from engine.kernels.formats import Format
from engine.kernels.native.loader import native_status
from engine.kernels.native.quantize import NATIVE_ARITHMETIC

EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
"""Dtypes of scales that are powers of two."""
NUMBERS = (torch.float32, torch.bfloat16, torch.float16)
_DECODED_AT_ONCE = 1 << 22
"""Numbers; bounds the memory that decoding takes beside its result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A stored tensor of a matrix.

    Args:
        ending: of its name, after the module's.
        dtypes: that it may have.
        rows, columns: of the matrix, to one index of the tensor; 0 where all share one.
        transposed: columns are its first dimension.
        last: numbers to an index, in a last dimension of their own.
    """

    ending: str
    dtypes: tuple[torch.dtype, ...]
    rows: int = 1
    columns: int = 1
    transposed: bool = False
    last: int = 1

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Returns its shape for a matrix [rows, columns]."""
        found = (_indices(self.rows, rows), _indices(self.columns, columns))
        return (*(found[::-1] if self.transposed else found), *((self.last,) if self.last > 1 else ()))

    def fits(self, shape: tuple[int, ...], rows: int, columns: int) -> bool:
        """Returns whether a tensor has the shape, but for dimensions of 1."""
        return [size for size in shape if size != 1] == [size for size in self.shape(rows, columns) if size != 1]

    def cut(self, stored: Tensor, shape: tuple[int, int], rows: slice, columns: slice) -> Tensor:
        """Returns the part of a stored tensor for a part of the matrix, as a view [rows, columns * last].

        Args:
            shape: of the whole matrix.
            rows, columns: with start and stop; the part may begin before them and end after them.
        """
        found = stored.reshape(self.shape(*shape))
        found = found.flatten(1) if self.last > 1 else found
        found = found.t() if self.transposed else found
        across = _range(self.columns, columns)
        return found[_range(self.rows, rows), across.start * self.last : across.stop * self.last]


def _indices(step: int, length: int) -> int:
    return -(-length // step) if step else 1


def _range(step: int, part: slice) -> slice:
    return slice(part.start // step, -(-part.stop // step)) if step else slice(0, 1)


class StoredMatrix(NamedTuple):
    """A matrix in a checkpoint, or the rows of one that belong to a linear.

    Args:
        spelling: of its tensors.
        tensors: ending of a name -> the whole stored tensor.
        shape: rows and columns of the stored matrix.
        first_row, num_rows: of the rows in it.
    """

    spelling: Spelling
    tensors: Mapping[str, Tensor]
    shape: tuple[int, int]
    first_row: int
    num_rows: int

    def parts(self, rows: slice, columns: slice, granule: int = 0) -> dict[str, Tensor]:
        """Returns the parts of the format of a cut; `granule` where the format's is smaller.

        Raises:
            UserError: the cut divides numbers that share a scale or a byte.
        """
        return self.spelling.parts(self.tensors, self.shape, self._rows(rows), columns, granule)

    def decode(self, out: Tensor, rows: slice, columns: slice) -> None:
        """Writes the numbers of a cut, anywhere, to `out` [rows, columns], any float dtype."""
        self.spelling.decode(self.tensors, self.shape, self._rows(rows), columns, out)

    def _rows(self, rows: slice) -> slice:
        return slice(self.first_row + rows.start, self.first_row + rows.stop)


class Spelling(ABC):
    """The way in which a library stores a matrix in few bits."""

    @property
    def weight(self) -> str:
        """The ending that the name of a matrix has where it is not in few bits."""
        return ".weight"

    @property
    def row_step(self) -> int:
        """Rows in one index of the codes or of the zero points."""
        return 1

    @property
    def column_step(self) -> int:
        """Columns in one index of the codes."""
        return 1

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of its numbers, as a user reads it."""

    @property
    @abstractmethod
    def format(self) -> Format:
        """The format of its parts.

        Raises:
            UserError: there is none that holds them.
        """

    @property
    @abstractmethod
    def layouts(self) -> tuple[Layout, ...]:
        """Its tensors, the codes first."""

    @property
    def group(self) -> int:
        """The columns of a row that share a scale; 0 for all."""
        return self.format.group

    @abstractmethod
    def shape(self, stored: Mapping[str, tuple[int, ...]], read: Mapping[str, Tensor]) -> tuple[int, int]:
        """Returns the rows and columns of a matrix whose tensors have the shapes `stored`; `read` has the tensors."""

    def known(self, dtypes: Mapping[str, torch.dtype], shapes: Mapping[str, tuple[int, ...]]) -> Self:
        """Returns the spelling with what only the stored tensors say, such as the dtype of scales."""
        return self

    @abstractmethod
    def load(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> dict[str, Tensor]:
        """Returns the parts of the format, for cuts by `Layout.cut` of a part [rows, columns] of a matrix that begins
        and ends where tensors allow it."""

    @abstractmethod
    def store(self, parts: Mapping[str, Tensor], columns: int) -> dict[str, Tensor]:
        """Returns the stored tensors by ending, contiguous, of the parts of a whole matrix."""

    def parts(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], rows: slice, columns: slice, granule: int = 0
    ) -> dict[str, Tensor]:
        """Returns the parts of matrix[rows, columns]; see `StoredMatrix.parts`."""
        kind = self.format
        unit = kind.group or (2 if kind.name == "int4" else 1)
        if columns.start % unit or (columns.stop % unit and columns.stop != shape[1]):
            raise UserError(_inside(kind, columns))
        whole = slice(*_aligned(rows, self.row_step, shape[0])), slice(*_aligned(columns, self.column_step, shape[1]))
        cuts = {one.ending: one.cut(tensors[one.ending], shape, *whole) for one in self.layouts}
        found = self.load(cuts, whole[0].stop - whole[0].start, whole[1].stop - whole[1].start)
        first, count = rows.start - whole[0].start, rows.stop - rows.start
        if kind.rows > 1:
            found["scales"] = _granules(found["scales"], kind, rows, granule or kind.granule)
        for name, part in found.items():
            if name != "scales" or kind.rows == 1:
                found[name] = part[first : first + count]
        start = (columns.start - whole[1].start) // kind.codes_per_byte
        stop = start + -(-(columns.stop - columns.start) // kind.codes_per_byte)
        found["codes"] = found["codes"][:, start:stop]
        return found

    def decode(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], rows: slice, columns: slice, out: Tensor
    ) -> None:
        """Writes the numbers of matrix[rows, columns] to `out`, a few rows at a time."""
        kind = replace(self.format, granule=1)
        wide = slice(*_aligned(columns, math.lcm(kind.group or 2, 2), shape[1]))
        height = max(1, _DECODED_AT_ONCE // max(1, wide.stop - wide.start) // self.row_step) * self.row_step
        is_direct = wide == columns and out.stride(1) == 1
        for first in range(rows.start, rows.stop, height):
            last = min(first + height, rows.stop)
            cut = self.parts(tensors, shape, slice(first, last), wide, 1)
            parts = {name: _by_rows(part).to(out.device) for name, part in cut.items()}
            into = out[first - rows.start : last - rows.start]
            found = into if is_direct else out.new_empty(last - first, wide.stop - wide.start)
            _decode(kind, parts, found)
            if not is_direct:
                into.copy_(found[:, columns.start - wide.start : columns.stop - wide.start])


def _by_rows(part: Tensor) -> Tensor:
    """Returns a part whose rows have no gaps, as compiled kernels read them; GPTQ's and AWQ's are stored by columns."""
    return part if part.stride(-1) == 1 else part.clone(memory_format=torch.contiguous_format)


def _decode(kind: Format, parts: Mapping[str, Tensor], out: Tensor) -> None:
    is_fast = out.device.type == "cpu" and native_status().available and out.dtype in (torch.float32, torch.bfloat16)
    (NATIVE_ARITHMETIC if is_fast else PLAIN).block_decode(kind, parts, out)


def _aligned(part: slice, step: int, length: int) -> tuple[int, int]:
    """Returns where the smallest part with `part` in it begins and ends, at multiples of `step` or the end."""
    return part.start // step * step, min(-(-part.stop // step) * step, length)


def _granules(scales: Tensor, kind: Format, rows: slice, granule: int) -> Tensor:
    """Returns the scales of blocks, a row for each granule of the cut.

    Args:
        scales: of the blocks that the cut touches.
    """
    first, count = rows.start // kind.rows, rows.stop - rows.start
    until = -rows.start % kind.rows  # rows to the next block
    if until < count and until % granule:
        raise UserError(
            f"{kind.name} has one scale for {kind.rows} rows, and a cut at row {rows.start} divides such a block: use "
            "a parallel.tensor that leaves each rank whole blocks."
        )
    starts = torch.arange(rows.start, rows.stop, granule)
    return scales[starts // kind.rows - first]


def _inside(kind: Format, columns: slice) -> str:
    return (
        f"{kind.name} stores {kind.group or 2} columns under one scale or in one byte, and a cut of columns "
        f"{columns.start} to {columns.stop} divides them: use a parallel.tensor that leaves each rank a multiple of "
        f"{kind.group or 2} columns."
    )
