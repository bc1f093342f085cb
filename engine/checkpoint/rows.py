"""Reads a stored weight a few rows at a time, in a dtype wide enough to compute in."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from engine.checkpoint.copying.contents import Content, block_tensor, row_blocks
from engine.checkpoint.copying.direct_io import Scratch
from engine.checkpoint.reader import TensorReader


class Rows(ABC):
    """A weight that is read a few rows at a time."""

    @abstractmethod
    def blocks(self, scratch: Scratch, dtype: torch.dtype, block_bytes: int) -> Iterator[Tensor]:
        """Yields its rows in order, [n, ...] of `dtype`; a block may be written to, and is valid until the next is
        asked for.

        Args:
            scratch: memory to work in.
            dtype: wide enough for the stored numbers.
            block_bytes: of a block as stored, about.
        """

    def stored_blocks(self, scratch: Scratch, block_bytes: int) -> Iterator[Tensor] | None:
        """Returns the rows as they are stored, read-only; None where they are not stored as rows."""
        return None


class ReadRows(Rows):
    """Rows from any reader.

    Args:
        reader, name: of the tensor.
    """

    def __init__(self, reader: TensorReader, name: str) -> None:
        self._reader, self._name = reader, name

    def blocks(self, scratch: Scratch, dtype: torch.dtype, block_bytes: int) -> Iterator[Tensor]:
        shape = self._reader.shape(self._name)
        for first, last in row_blocks(shape, self._reader.dtype(self._name).itemsize, block_bytes):
            out = block_tensor(scratch, "exact", dtype, (last - first, *shape[1:]))
            self._reader.read_rows(self._name, first, last, out)
            yield out


class StoredRows(Rows):
    """Rows whose bytes come from a `Content`.

    Args:
        content: of the whole weight.
        shape, stored: shape and dtype of the weight.
    """

    def __init__(self, content: Content, shape: tuple[int, ...], stored: torch.dtype) -> None:
        self._content, self._shape, self._stored = content, shape, stored

    def stored_blocks(self, scratch: Scratch, block_bytes: int) -> Iterator[Tensor]:
        row_bytes = math.prod(self._shape[1:]) * self._stored.itemsize
        step = max(1, block_bytes // max(1, row_bytes))
        for block in self._content.blocks(scratch, max(1, row_bytes)):
            rows = torch.frombuffer(block, dtype=self._stored).view(-1, *self._shape[1:])
            yield from rows.split(step)

    def blocks(self, scratch: Scratch, dtype: torch.dtype, block_bytes: int) -> Iterator[Tensor]:
        for rows in self.stored_blocks(scratch, block_bytes):
            yield block_tensor(scratch, "exact", dtype, tuple(rows.shape)).copy_(rows)
