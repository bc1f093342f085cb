"""Matrices of an export that are stored in few bits: computed once, written as several tensors.

A matrix of the checkpoint is one logical weight, or several of them in its rows (query, key and value). One matrix's
codes and scales are in memory for each thread that writes.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.copying.contents import Content, MemoryBytes, block_tensor
from engine.checkpoint.copying.direct_io import Scratch
from engine.checkpoint.rows import Rows
from engine.conversion.add_adapter import ROUNDING, Rounding
from engine.errors import UserError
from engine.kernels.formats import Format, part_shapes

_READ_BYTES = 1 << 20
"""Bytes of the stored weight that are read at a time."""
_BLOCK_NUMBERS = 1 << 20
"""Numbers that are rounded at a time, about."""
HEIGHT = 128
"""Blocks of rows are multiples of it, which no format's scales divide."""

Parts = dict[str, Tensor]
Store = Callable[[Parts, int], Parts]


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A logical weight in a matrix of the checkpoint.

    Args:
        name: logical name.
        count: its rows.
        first, step: where they lie in the matrix.
        rows: the rows, with what training changed.
        update_norm: Frobenius norm of that change; None where it is not known.
    """

    name: str
    count: int
    first: int
    step: int
    rows: Rows
    update_norm: float | None

    @property
    def at(self) -> slice:
        """Its rows in the matrix."""
        return slice(self.first, self.first + self.count * self.step, self.step)

    def blocks(self, scratch: Scratch) -> Iterator[Tensor]:
        """Yields its rows in order, fp32 [n, I]."""
        return self.rows.blocks(scratch, torch.float32, _READ_BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """A matrix of the checkpoint.

    Args:
        module: its module's name there.
        members: by their first rows.
        columns: I.
    """

    module: str
    members: tuple[Member, ...]
    columns: int

    @property
    def rows(self) -> int:
        """O."""
        return sum(member.count for member in self.members)

    def blocks(self, scratch: Scratch) -> Iterator[tuple[int, Tensor]]:
        """Yields (first row, fp32 [n, I]) of members that lie one after another, n a multiple of `HEIGHT` but in the
        last block; valid until the next."""
        height = min(max(1, _BLOCK_NUMBERS // (HEIGHT * self.columns)) * HEIGHT, self.rows)
        held = block_tensor(scratch, "matrix", torch.float32, (height, self.columns))
        first = filled = 0
        for member in self.members:
            assert member.step == 1, member.name
            for rows in member.blocks(scratch):
                start = 0
                while start < rows.shape[0]:
                    count = min(height - filled, rows.shape[0] - start)
                    held[filled : filled + count] = rows[start : start + count]
                    start, filled = start + count, filled + count
                    if filled == height or first + filled == self.rows:
                        yield first, held[:filled]
                        first, filled = first + filled, 0
        assert first == self.rows, (self.module, first)


@dataclass(frozen=True, slots=True)
class Coded:
    """A matrix as it is written.

    Args:
        parts: of its format.
        roundings: of its members, by logical name.
        has_values: not all of it is zero.
    """

    parts: Parts
    roundings: Mapping[str, Rounding]
    has_values: bool


class Coder(ABC):
    """Makes the parts of matrices."""

    @abstractmethod
    def format(self, matrix: Matrix) -> Format:
        """Returns the format of a matrix's parts."""

    @abstractmethod
    def code(self, matrix: Matrix, scratch: Scratch) -> Coded:
        """Returns a matrix's parts, and what rounding did.

        Raises:
            UserError: a number is not finite.
        """

    def empty(self, matrix: Matrix, device: str = "cpu") -> Parts:
        """Returns parts without numbers."""
        shapes = part_shapes(self.format(matrix), matrix.rows, matrix.columns)
        return {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()}


@dataclass(frozen=True, slots=True)
class _Written:
    tensors: Mapping[str, Tensor]
    facts: dict[str, Any]


class Latest(threading.local):
    """The matrix that a thread computed last: it writes all tensors of one before the next."""

    def __init__(self) -> None:
        self.matrix: PackedMatrix | None = None
        self.written: _Written | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedMatrix:
    """A matrix on its way into a checkpoint.

    Args:
        matrix: its numbers.
        coder: makes its parts.
        store: the parts and the columns of a matrix -> its tensors by the ending of their names, the codes first.
        latest: shared by the matrices of an export.
    """

    matrix: Matrix
    coder: Coder
    store: Store
    latest: Latest

    def declared(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Returns ending of a name -> shape and dtype of each of its tensors."""
        stored = self.store(self.coder.empty(self.matrix, "meta"), self.matrix.columns)
        return {ending: (tuple(tensor.shape), tensor.dtype) for ending, tensor in stored.items()}

    def written(self, scratch: Scratch) -> _Written:
        """Returns the tensors and facts, which this thread has just made or makes now."""
        if self.latest.matrix is not self or self.latest.written is None:
            self.latest.matrix, self.latest.written = None, None  # the last one's memory, before there is more
            self.latest.matrix, self.latest.written = self, self._write(scratch)
        return self.latest.written

    def _write(self, scratch: Scratch) -> _Written:
        try:
            coded = self.coder.code(self.matrix, scratch)
        except UserError as error:
            raise UserError(f"{self.matrix.module}: {error}") from error
        norms = {member.name: member.update_norm for member in self.matrix.members}
        facts = {f"{ROUNDING}/{name}": one.to_json(norms[name]) for name, one in coded.roundings.items()}
        tensors = self.store(coded.parts, self.matrix.columns)
        return _Written(tensors, {**facts, "finite": True, "zero": not coded.has_values})


class PackedContent(Content):
    """One of the tensors of a matrix.

    Args:
        packed: the matrix.
        ending: of the tensor's name.
        reports: it has the facts about the matrix.
    """

    def __init__(self, packed: PackedMatrix, ending: str, *, reports: bool) -> None:
        self._packed, self._ending, self._reports = packed, ending, reports
        self._facts: dict[str, Any] = {}

    def blocks(self, scratch: Scratch, unit: int = 1) -> Iterator[memoryview]:
        written = self._packed.written(scratch)
        if self._reports:
            self._facts = written.facts
        yield from MemoryBytes(written.tensors[self._ending]).blocks(scratch, unit)

    def facts(self) -> dict[str, Any]:
        return self._facts
