"""Packs documents of different lengths into rows of one length.

Best-fit decreasing: the longest document first, each into the fullest row that still has room for it. It needs at
most 11/9 of the fewest possible rows, plus a constant, and much less on real lengths. Documents of one length are
placed together and rows with the same room are kept together, so that the work grows with the number of distinct
(length, room) pairs and not with documents times rows.

Pure numpy; what a document is made of is not known here. This is the specification: the compiled code
(`engine.kernels.native.packing`) gives the same rows in less time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Packs:
    """The assignment of documents to rows.

    Args:
        offsets: int64 [rows + 1]; row r holds documents[offsets[r] : offsets[r + 1]].
        documents: int64 [documents], each index exactly once, in their order in the row.
        reused: int64 [documents], how many of its first tokens each document of `documents` has from the one before it,
            which are in the row once (`engine.data.prefixes`); None where none has any.
    """

    offsets: IntArray
    documents: IntArray
    reused: IntArray | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int) -> IntArray:
        """Returns the documents of one row."""
        return self.documents[self.offsets[index] : self.offsets[index + 1]]

    def reused_in(self, index: int) -> IntArray:
        """Returns how many of its first tokens each document of one row has from the one before it."""
        span = slice(self.offsets[index], self.offsets[index + 1])
        return np.zeros(span.stop - span.start, dtype=np.int64) if self.reused is None else self.reused[span]

    def chosen(self, rows: IntArray) -> Packs:
        """Returns some of the rows, in this order, with the documents' old numbers."""
        spans = [slice(self.offsets[row], self.offsets[row + 1]) for row in rows.tolist()]

        def of(values: IntArray) -> IntArray:
            return np.concatenate([values[span] for span in spans])

        return Packs(
            offsets=np.cumsum([0, *(span.stop - span.start for span in spans)], dtype=np.int64),
            documents=of(self.documents),
            reused=None if self.reused is None else of(self.reused),
        )

    def of_groups(self, size: int) -> Packs:
        """Returns the same rows by documents, where groups of `size` consecutive documents were packed."""
        assert self.reused is None, "tokens are reused by documents, not by groups"
        if size == 1:
            return self
        documents = (self.documents[:, None] * size + np.arange(size)).ravel()
        return Packs(offsets=self.offsets * size, documents=documents)


def one_each(count: int) -> Packs:
    """Returns the rows that hold one document each, in order."""
    return Packs(offsets=np.arange(count + 1, dtype=np.int64), documents=np.arange(count, dtype=np.int64))


def pack(lengths: NDArray[np.integer], capacity: int) -> Packs:
    """Assigns documents to rows.

    The same lengths give the same rows. There are never more rows than next-fit in the given order needs (its
    result is taken in the rare case that it is the better one).

    Args:
        lengths: tokens of each document, from 1 to `capacity`.
        capacity: tokens of a row.

    Returns:
        The rows; inside a row documents are sorted from long to short.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if not len(sizes):
        return one_each(0)
    assert sizes.min() >= 1 and sizes.max() <= capacity, (int(sizes.min()), int(sizes.max()), capacity)
    order = np.argsort(-sizes, kind="stable")
    rows = _best_fit(sizes[order], capacity)
    simple = _next_fit(sizes, capacity)
    if simple[-1] < rows.max():
        rows = simple[order]
    by_row = np.argsort(rows, kind="stable")
    counts = np.bincount(rows)
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return Packs(offsets=offsets, documents=order[by_row])


def _best_fit(sizes: IntArray, capacity: int) -> IntArray:
    """Returns the row of each document; `sizes` must be in descending order."""
    rows = np.empty(len(sizes), dtype=np.int64)
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    has_room = np.zeros(capacity + 1, dtype=bool)
    num_rows = 0
    starts = np.flatnonzero(np.diff(sizes, prepend=sizes[0] + 1))
    ends = np.append(starts[1:], len(sizes))
    for first, end in zip(starts.tolist(), ends.tolist(), strict=True):
        size = int(sizes[first])
        while first < end:
            room = size + int(has_room[size:].argmax())
            if has_room[room]:
                # A row that has taken one of this size and still has room for another is the fullest such row, so it
                # is filled up.
                per_row = room // size
                taken = min(len(by_room[room]), -(-(end - first) // per_row))
                chosen = by_room[room][-taken:]
                del by_room[room][-taken:]
                has_room[room] = bool(by_room[room])
            else:
                room = capacity
                per_row = capacity // size
                taken = -(-(end - first) // per_row)
                chosen = list(range(num_rows, num_rows + taken))
                num_rows += taken
            placed = min(end - first, taken * per_row)
            rows[first : first + placed] = np.repeat(np.asarray(chosen, dtype=np.int64), per_row)[:placed]
            first += placed
            full, rest = divmod(placed, per_row)
            _keep(by_room, has_room, room - per_row * size, chosen[:full])
            _keep(by_room, has_room, room - rest * size, chosen[full:])
    return rows


def _keep(by_room: list[list[int]], has_room: NDArray[np.bool_], room: int, rows: list[int]) -> None:
    if rows and room:
        by_room[room].extend(rows)
        has_room[room] = True


def _next_fit(sizes: IntArray, capacity: int) -> IntArray:
    """Returns the row of each document when a row is closed as soon as one does not fit."""
    ends = np.cumsum(sizes)
    firsts = []
    first = 0
    while first < len(sizes):
        firsts.append(first)
        start = ends[first] - sizes[first]
        first = int(np.searchsorted(ends, start + capacity, side="right"))
    rows = np.zeros(len(sizes), dtype=np.int64)
    rows[firsts] = 1
    return np.cumsum(rows) - 1
