"""Tensors that can be copied from where they are stored, with no tensor made in between."""

from __future__ import annotations

import math
from pathlib import Path

from engine.checkpoint.contents import Content, GatheredRows, Run, StoredBytes, contiguous_copies, read_ahead, touched
from engine.checkpoint.reader import TensorReader
from engine.checkpoint.reshard import Box


class StoredTensors(TensorReader):
    """A `TensorReader` that may know where the bytes of its pieces lie."""

    def stored_at(self, name: str, index: int) -> tuple[Path, int] | None:
        """The file that holds piece `index` in one run, and where in it the piece begins; None where none does."""
        return None

    def piece_checksum(self, name: str, index: int) -> str | None:
        """The recorded checksum of a piece, where there is one."""
        return None

    def check_piece(self, name: str, index: int) -> None:
        """Raises UserError where a piece does not have its recorded checksum."""

    def check_tensor(self, name: str) -> None:
        """Raises UserError where a piece of the tensor does not have its recorded checksum."""
        self._check_pieces(name, set(range(len(self.boxes(name)))))

    def content(self, name: str, box: Box) -> Content:
        """What a part of a tensor holds, for writing it elsewhere without holding it."""
        shape, boxes, itemsize = self.shape(name), self.boxes(name), self.dtype(name).itemsize
        placed = contiguous_copies(shape, box, boxes)
        if placed is None:
            needed = {copy.source for copy in touched(shape, box, boxes)}
            return GatheredRows(self, name, box, lambda: self._check_pieces(name, needed))
        runs, partial = [], set()
        for copy in placed:
            if (place := self.stored_at(name, copy.source)) is None:
                return GatheredRows(self, name, box)
            recorded = self.piece_checksum(name, copy.source) if copy.is_whole else None
            if not copy.is_whole:
                partial.add(copy.source)
            path, offset = place
            runs.append(Run(path, offset + copy.first * itemsize, copy.num_elements * itemsize, recorded))
        return StoredBytes(runs, lambda: self._check_pieces(name, partial))

    def _check_pieces(self, name: str, indices: set[int]) -> None:
        """Checks pieces, all of which is looked at, so the system is asked to read them ahead."""
        shape, boxes, itemsize = self.shape(name), self.boxes(name), self.dtype(name).itemsize
        for index in sorted(indices):
            if (place := self.stored_at(name, index)) is not None:
                read_ahead(*place, math.prod(boxes[index].shape(shape)) * itemsize)
        for index in sorted(indices):
            self.check_piece(name, index)
