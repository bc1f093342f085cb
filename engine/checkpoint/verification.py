"""Verification of stored bytes: the checksum of every piece is computed where any of it is read.

A reader returns its pieces through a `PieceChecks`. A process that reads alone sums each piece before its first use.
Ranks that read parts of the same pieces would each sum all of them, so `checked_together` defers the sums to the end
of the reading and has the ranks of each machine share them: a piece that any of them read is summed once per machine,
since each machine may hold a copy of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import NoReturn, Protocol, cast

import numpy as np
from torch import Tensor

from engine.checkpoint.copying.direct_io import default_threads
from engine.checkpoint.safetensors_file import checksum
from engine.distributed.collectives import gather_objects
from engine.distributed.mesh import Axis
from engine.files.holder import this_machine

Piece = tuple[str, int]
"""Tensor and index of a stored piece."""


class CheckedReader(Protocol):
    """A reader whose pieces have checksums."""

    def piece_counts(self) -> dict[str, int]:
        """Returns the number of pieces of each tensor, in the same order on every rank."""

    def stored_view(self, name: str, index: int) -> Tensor:
        """Returns a piece as it is in its file, unchecked."""

    def piece_bytes(self, name: str, index: int) -> int:
        """Returns the bytes of a piece."""

    def recorded_sum(self, name: str, index: int) -> str | None:
        """Returns the checksum that a piece must have; None where none is on record."""

    def refuse_piece(self, name: str, index: int, found: str, expected: str) -> NoReturn:
        """Raises UserError about a piece that has another checksum."""


class PieceChecks:
    """The checksums of one reader's pieces, each computed once.

    Args:
        reader: whose pieces they are.
    """

    def __init__(self, reader: CheckedReader) -> None:
        self._reader = reader
        self.sums: dict[Piece, str] = {}
        """Checksums of the pieces that were summed; all of them have their recorded checksums."""
        self._learns = False
        self._put_off: set[Piece] | None = None
        self._is_off = False

    def view(self, name: str, index: int) -> Tensor:
        """Returns a piece, once its checksum is known to be the recorded one.

        Raises:
            UserError: it is not.
        """
        tensor = self._reader.stored_view(name, index)
        self.check(name, index, tensor)
        return tensor

    def check(self, name: str, index: int, tensor: Tensor | None = None) -> None:
        """Checks a piece before its first use; for callers that read it otherwise than by `view`.

        Args:
            tensor: the piece, where it is at hand.

        Raises:
            UserError: its checksum is not the recorded one.
        """
        piece = (name, index)
        if self._is_off or piece in self.sums or not (self._learns or self._reader.recorded_sum(*piece) is not None):
            return
        if self._put_off is None:
            self.record(piece, self.summing(*piece)() if tensor is None else checksum(tensor))
        else:
            self._put_off.add(piece)

    def summing(self, name: str, index: int) -> Callable[[], str]:
        """Returns what computes a piece's checksum, in any thread."""
        return partial(checksum, self._reader.stored_view(name, index))

    def record(self, piece: Piece, found: str) -> None:
        """Stores a piece's checksum; raises UserError where another one is recorded, or was found elsewhere."""
        expected = self._reader.recorded_sum(*piece) or self.sums.get(piece)
        if expected is not None and found != expected:
            self._reader.refuse_piece(*piece, found, expected)
        self.sums[piece] = found

    @contextmanager
    def glancing(self) -> Iterator[None]:
        """Hands out pieces unchecked inside the block, for callers that read a few rows and compute nothing with
        them.
        """
        self._is_off = True
        try:
            yield
        finally:
            self._is_off = False

    def begin(self, *, together: bool, learn: bool) -> None:
        """Defers the checks; see `checked_together`."""
        self._learns, self._put_off = learn, set() if together else None

    def end(self) -> set[Piece]:
        """Returns the pieces whose checks were deferred since `begin`."""
        found, self._learns, self._put_off = self._put_off or set(), False, None
        return found

    def share(self, put_off: set[Piece], axis: Axis, *, learn: bool) -> None:
        """Sums the pieces that the ranks of this machine deferred, each rank a share; the outcome is the same on all
        ranks.
        """
        pieces = _Places(self._reader.piece_counts())
        mine = np.array(sorted(pieces.place(piece) for piece in put_off), dtype=np.uint32)
        everyone = cast(list[tuple[str, np.ndarray]], gather_objects((this_machine(), mine), axis))
        neighbours = [rank for rank, (machine, _) in enumerate(everyone) if machine == everyone[axis.rank][0]]
        read = np.unique(np.concatenate([everyone[rank][1] for rank in neighbours])).tolist()
        sizes = {place: self._reader.piece_bytes(*pieces.piece(place)) for place in read}
        own = _own_share(sizes, neighbours.index(axis.rank), len(neighbours))
        sums = [self.summing(*pieces.piece(place)) for place in own]
        with ThreadPoolExecutor(default_threads(), thread_name_prefix="check") as pool:
            found = dict(zip(own, pool.map(lambda one: one(), sums), strict=True))
        reported = {
            place: value
            for place, value in found.items()
            if learn or value != self._reader.recorded_sum(*pieces.piece(place))
        }
        for known in cast(list[dict[int, str]], gather_objects(reported, axis)):
            for place, value in known.items():
                self.record(pieces.piece(place), value)
        for place in read:
            self.sums.setdefault(pieces.piece(place), self._reader.recorded_sum(*pieces.piece(place)) or "")


class _Places:
    """Numbers for the pieces of all tensors, in order.

    Args:
        counts: number of pieces of each tensor.
    """

    def __init__(self, counts: dict[str, int]) -> None:
        self._names = list(counts)
        stops = list(accumulate(counts.values()))
        self._starts = [0, *stops[:-1]]
        self._start_of = dict(zip(self._names, self._starts, strict=False))

    def place(self, piece: Piece) -> int:
        return self._start_of[piece[0]] + piece[1]

    def piece(self, place: int) -> Piece:
        tensor = bisect_right(self._starts, place) - 1
        return self._names[tensor], place - self._starts[tensor]


def _own_share(sizes: dict[int, int], rank: int, ranks: int) -> list[int]:
    """Returns this rank's share: neighbouring pieces of about as many bytes as the other ranks get."""
    total, before, own = sum(sizes.values()), 0, []
    for place, size in sizes.items():
        if min(before * ranks // max(1, total), ranks - 1) == rank:
            own.append(place)
        before += size
    return own


@contextmanager
def checked_together(checks: Sequence[PieceChecks], axis: Axis, *, learn: bool = False) -> Iterator[None]:
    """Defers checks while all ranks of the axis read, and shares them on leaving the block. Collective.

    No tensor may be used before that.

    Args:
        checks: of the readers.
        axis: the ranks.
        learn: sum pieces without a recorded checksum too, and let all ranks know the sums of all pieces.

    Raises:
        UserError: a piece has changed since it was written; the same on all ranks.
    """
    for one in checks:
        one.begin(together=axis.size > 1, learn=learn)
    put_off: list[set[Piece]] = []
    try:
        yield
    finally:
        put_off += [one.end() for one in checks]
    if axis.size > 1:
        for one, pieces in zip(checks, put_off, strict=True):
            one.share(pieces, axis, learn=learn)
