"""Tensors that can be copied from where they are stored, with no tensor made in between."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import NoReturn

from engine.checkpoint.copying.contents import Content, FileRange, GatheredRows, StoredBytes
from engine.checkpoint.copying.direct_io import read_ahead
from engine.checkpoint.copying.exchange import Exchange, StoredPiece
from engine.checkpoint.reader import TensorReader
from engine.checkpoint.reshard import Box, box_spec, plan_copies
from engine.checkpoint.rows import Rows, StoredRows
from engine.checkpoint.safetensors_file import num_bytes


class StoredTensors(TensorReader):
    """A `TensorReader` that may know where in files the bytes of its pieces are."""

    def stored_at(self, name: str, index: int) -> tuple[Path, int] | None:
        """Returns the file that holds piece `index` in one run, and where in it the piece begins; None where none
        does.
        """
        return None

    def recorded_sum(self, name: str, index: int) -> str | None:
        """Returns the recorded checksum of a piece, where there is one."""
        return None

    def refuse_piece(self, name: str, index: int, found: str, expected: str) -> NoReturn:
        """Raises UserError about a piece that does not have its recorded checksum."""
        raise NotImplementedError

    def content(self, name: str, box: Box) -> Content:
        """Returns the contents of a part of a tensor, as a `Content` that can be copied elsewhere block by block."""
        return self.contents(name, [box])[0]

    def rows(self, name: str) -> Rows:
        """Returns the rows of a tensor, for computing with them."""
        return StoredRows(self.content(name, Box()), self.shape(name), self.dtype(name))

    def contents(self, name: str, wanted: Sequence[Box]) -> list[Content]:
        """Returns the contents of parts of a tensor; those that read the same pieces are parts of one `Exchange`."""
        stored = self._stored_pieces(name)
        if stored is None:
            return [GatheredRows(self, name, box) for box in wanted]
        runs = [self._runs(name, box, stored) for box in wanted]
        exchange = Exchange(self.shape(name), self.dtype(name), stored, wanted)
        return [exchange.part(index) if own is None else StoredBytes(own) for index, own in enumerate(runs)]

    def _stored_pieces(self, name: str) -> list[StoredPiece] | None:
        """Returns the stored pieces; None where one is not in a file as it is."""
        found = []
        for index, box in enumerate(self.boxes(name)):
            place = self.stored_at(name, index)
            if place is None:
                return None
            size = num_bytes(self.dtype(name), box.shape(self.shape(name)))
            refuse = partial(self.refuse_piece, name, index)
            found.append(StoredPiece(box=box, run=FileRange(*place, size, self.recorded_sum(name, index), refuse)))
        return found

    def _runs(self, name: str, box: Box, stored: Sequence[StoredPiece]) -> list[FileRange] | None:
        """Returns the runs that make up a part one after another; None where there are none, or where a piece would be
        read in parts that must be checked as a whole."""
        shape, itemsize = self.shape(name), self.dtype(name).itemsize
        runs: list[tuple[int, FileRange]] = []
        for copy in plan_copies(box_spec(shape, box), [piece.box for piece in stored]):
            run, whole = stored[copy.source].run, stored[copy.source].box.shape(shape)
            first, place = _start(copy.source_slices, whole), _start(copy.local_slices, box.shape(shape))
            if first is None or place is None:
                return None
            if copy.num_elements < math.prod(whole):
                if run.checksum is not None:
                    return None
                run = FileRange(run.path, run.offset + first * itemsize, copy.num_elements * itemsize)
            runs.append((place, run))
        return [run for _, run in sorted(runs, key=itemgetter(0))]

    def expect_rows(self, name: str, rows: Sequence[int]) -> None:
        shape, dtype = self.shape(name), self.dtype(name)
        for index, box in enumerate(self.boxes(name) if rows else ()):
            if (place := self.stored_at(name, index)) is None:
                continue
            (start, stop), *_ = box.ranges(shape)
            row_bytes = num_bytes(dtype, box.shape(shape)[1:])
            offsets = [place[1] + (row - start) * row_bytes for row in rows if start <= row < stop]
            read_ahead(place[0], [(offset, row_bytes) for offset in offsets])


def _start(slices: tuple[slice, ...], shape: tuple[int, ...]) -> int | None:
    """Returns the first element of slices of a row-major tensor, counted from 0; None where they are not contiguous."""
    lengths = [part.stop - part.start for part in slices]
    partial = [dim for dim, length in enumerate(lengths) if length != shape[dim]]
    if partial and any(length != 1 for length in lengths[: partial[-1]]):
        return None
    return sum(part.start * math.prod(shape[dim + 1 :]) for dim, part in enumerate(slices))
