"""Documents that begin with the same tokens, arranged so that a row computes their common beginning once.

A row lists its documents so that each may begin like the one before it: tokens that lie in the row already are reused,
and only the rest is placed (`Packs.reused`). `branches_of_row` turns that list into a tree (`engine.branches`).

The last token that two documents share is placed by both, because each predicts another token from it. So every placed
token has one label. Targets among the reused tokens stand for the targets of several documents: their weights add up,
where a loss is a sum over tokens. Where documents have values of their own beside their tokens (answers, completions),
a document reuses no target and nothing behind its first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from engine.data.columns import Columns, best_fit, sum_rows
from engine.data.dataset import TokenDataset
from engine.data.packing import IntArray, Packs

LEAST_REUSED = 16
"""Tokens that a document must reuse to become a branch, whose attention is one piece of work more."""
_SORTED = 1 << 16
"""Groups of documents that are sorted at a time, so that the copies of their tokens stay small."""


def with_shared_prefixes(
    dataset: TokenDataset, *, least_saved: float = 0.0, regroups: bool = True, ranks: int = 1
) -> TokenDataset:
    """Returns the data set with rows in which documents reuse the beginnings of others, where that saves anything.

    Args:
        dataset: of documents that may be shared (see `can_share`).
        least_saved: share of all tokens that must be saved; else the data set is returned as it is.
        regroups: whether documents that begin alike come into the same rows, up to the data set's row length; False
            keeps the rows' documents.
        ranks: that share the rows; where rows are not packed, bundles are cut into parts where that leaves the rank
            that has most of them with fewer tokens.
    """
    assert can_share(dataset), "documents with something beside their tokens that cannot be shared"
    sets = [dataset.columns, *(companion.columns for companion in dataset.companions.values())]
    if not any(_may_save(columns, least_saved) for columns in sets):
        return dataset
    rows = _arranged(sets, dataset, ranks) if regroups else dataset.rows
    reused = [reused_tokens(columns, rows) for columns in sets]
    saved, total = sum(int(one.sum()) for one in reused), sum(int(columns.lengths.sum()) for columns in sets)
    # packed rows are all of one length: as many of them cost as much
    if not saved or saved < least_saved * total or (regroups and dataset.packing and len(rows) >= len(dataset)):
        return dataset
    companions = {
        name: _with_rows(companion, replace(rows, reused=one))
        for (name, companion), one in zip(dataset.companions.items(), reused[1:], strict=True)
    }
    return _with_rows(dataset, replace(rows, reused=reused[0]), companions)


def can_share(dataset: TokenDataset) -> bool:
    """Returns whether tokens of a document's beginning are all that it has there."""
    return all(extra.can_share for one in (dataset, *dataset.companions.values()) for extra in one.extras)


def _with_rows(dataset: TokenDataset, rows: Packs, companions: dict[str, TokenDataset] | None = None) -> TokenDataset:
    found = TokenDataset(
        dataset.columns,
        rows,
        seq_length=dataset.seq_length,
        packing=dataset.packing,
        companions=companions,
        report=dataset.report,
    )
    found.read_with(dataset.family, dataset.decoded)
    return found


def _limits(columns: Columns) -> IntArray:
    """Returns int64 [D], how many of each document's first tokens may be compared with another's."""
    if not columns.extras:
        return columns.lengths
    found = _first_targets(columns)
    for extra in columns.extras:
        if (least := extra.shareable()) is not None:
            found = np.minimum(found, least)
    return found


def _first_targets(columns: Columns) -> IntArray:
    """Returns int64 [D], the first target of each document, or its length where it has none."""
    found = columns.lengths.copy()
    for number, (start, length) in enumerate(zip(columns.starts.tolist(), columns.lengths.tolist(), strict=True)):
        targets = np.ones(length, dtype=bool) if columns.targets is None else columns.targets[start : start + length]
        places = np.flatnonzero(targets[1:])
        if len(places):
            found[number] = 1 + places[0]
    return found


def _common(columns: Columns, one: int, other: int, most: int) -> int:
    """Returns how many tokens of a document may be reused from another: all but the last that they have in common, as
    far as the same of them are targets.

    Args:
        most: no more than these are compared.
    """
    starts = int(columns.starts[one]), int(columns.starts[other])
    size = min(int(columns.lengths[one]), int(columns.lengths[other]), most)
    first, second = (columns.tokens[start : start + size] for start in starts)
    differ = first != second
    common = int(differ.argmax()) if differ.any() else size
    reused = max(common - 1, 0)
    if reused and columns.targets is not None:
        # the targets that reused tokens predict; a document's first token never is one
        first, second = (columns.targets[start + 1 : start + 1 + reused] for start in starts)
        differ = first != second
        reused = int(differ.argmax()) if differ.any() else reused
    return reused


def reused_tokens(columns: Columns, rows: Packs) -> IntArray:
    """Returns int64 [documents], how many of its first tokens each document of the rows reuses from the one before it.

    Args:
        rows: which documents are in which row.
    """
    found = np.zeros(len(rows.documents), dtype=np.int64)
    limits = _limits(columns)
    firsts = set(rows.offsets.tolist())
    documents = rows.documents.tolist()
    for place in range(1, len(documents)):
        if place in firsts:
            continue
        one, other = documents[place], documents[place - 1]
        reused = _common(columns, one, other, int(min(limits[one], limits[other])))
        found[place] = reused if reused >= LEAST_REUSED else 0
    return found


def _arranged(sets: Sequence[Columns], dataset: TokenDataset, ranks: int) -> Packs:
    """Returns rows whose documents may begin alike."""
    columns, group = dataset.columns, dataset.group
    ordered = _sorted_groups(columns)
    line = Packs(offsets=np.array([0, len(ordered)]), documents=ordered).of_groups(group)
    reused = [reused_tokens(one, line) for one in sets]
    # a group's tokens behind the group before it, and alone; of several sets the larger
    within = [
        sum_rows(one.lengths[line.documents] - less, np.arange(0, len(line.documents) + 1, group))
        for one, less in zip(sets, reused, strict=True)
    ]
    first = reused[0].reshape(-1, group)[:, 0]
    after = np.max(within, axis=0)
    alone = np.max([own + less.reshape(-1, group)[:, 0] for own, less in zip(within, reused, strict=True)], axis=0)
    bundles = _bundles(after, alone, first > 0, dataset.seq_length)
    if ranks > 1 and not dataset.packing:
        bundles = _dealt(after, alone, first > 0, bundles, ranks)
    rows = _Bundled(ordered, bundles, alone, after)
    if not dataset.packing:
        return rows.each().of_groups(group)
    # filled one after the other, where a bundle may continue in the next row, which then has its beginning too
    anywhere = np.ones(len(after), dtype=np.bool_)
    filled = Packs(offsets=_bundles(after, alone, anywhere, dataset.seq_length), documents=ordered)
    fitted = rows.fitted(dataset.seq_length)
    return (fitted if len(fitted) <= len(filled) else filled).of_groups(group)


def _may_save(columns: Columns, share: float) -> bool:
    """Returns whether documents that begin like another have so many of all tokens; quick, and True where unknown."""
    if columns.identity is not None:
        return True
    long = np.flatnonzero(columns.lengths > LEAST_REUSED)
    beginnings = columns.tokens[columns.starts[long][:, None] + np.arange(LEAST_REUSED + 1)]
    rows = np.ascontiguousarray(beginnings).view(f"V{beginnings.itemsize * beginnings.shape[1]}")[:, 0]
    _, kinds, counts = np.unique(rows, return_inverse=True, return_counts=True)
    alike = columns.lengths[long][counts[kinds] > 1].sum()
    return bool(alike > 0 and alike >= share * columns.lengths.sum())


def _sorted_groups(columns: Columns) -> IntArray:
    """Returns int64, the groups of documents in the order of their first documents' tokens, so that those that begin
    alike are neighbours."""

    def key(number: int) -> bytes:
        start = int(columns.starts[number])
        return columns.tokens[start : start + int(columns.lengths[number])].astype(">u4").tobytes()

    step, count = _SORTED * columns.group, len(columns.lengths)
    pieces = [range(first, min(first + step, count), columns.group) for first in range(0, count, step)]
    found = [number for piece in pieces for number in sorted(piece, key=key)]
    return np.array(found, dtype=np.int64) // columns.group


def _bundles(after: IntArray, alone: IntArray, joins: NDArray[np.bool_], capacity: int) -> IntArray:
    """Returns int64 [bundles + 1], where bundles begin: neighbours that begin alike, as many as fit into a row.

    Args:
        after, alone: int64 [groups], tokens of each group behind the one before it, and alone.
        joins: bool [groups], whether a group may follow the one before it.
        capacity: tokens of a row.
    """
    starts, held = [0], int(alone[0])
    for place in range(1, len(after)):
        more = int(after[place])
        if joins[place] and held + more <= capacity:
            held += more
        else:
            starts.append(place)
            held = int(alone[place])
    return np.array([*starts, len(after)], dtype=np.int64)


def _bundle_tokens(after: IntArray, alone: IntArray, offsets: IntArray) -> IntArray:
    """Returns int64 [bundles], the tokens of each: its first group's alone, and of the others those behind it."""
    first = offsets[:-1]
    return sum_rows(after, offsets) - after[first] + alone[first]


def _dealt(after: IntArray, alone: IntArray, joins: NDArray[np.bool_], whole: IntArray, ranks: int) -> IntArray:
    """Returns bundles that are cut into the parts with which the rank that has most rows has the fewest tokens.

    Args:
        whole: int64 [bundles + 1], where bundles begin that are as long as a row allows.
    """
    first, others = whole[:-1], np.diff(whole) - 1
    behind = _bundle_tokens(after, alone, whole) - alone[first]
    best, least = whole, 0
    for parts in range(1, int(others.max()) + 2):
        of_part = -(-(others + 1) // parts) - 1  # groups of a part behind its first one
        room = int(max(alone.max(), (alone[first] - (-behind * of_part // np.maximum(others, 1))).max()))
        bundles = _bundles(after, alone, joins, room)
        sizes = _bundle_tokens(after, alone, bundles)
        tokens = -(-len(sizes) // ranks) * int(sizes.max())
        if parts == 1 or tokens < least:
            best, least = bundles, tokens
    return best


@dataclass(frozen=True, slots=True)
class _Bundled:
    """Groups in the order in which they are neighbours, cut into bundles.

    Args:
        ordered: int64 [groups].
        offsets: int64 [bundles + 1].
        alone, after: int64 [groups], tokens of each group alone, and behind the one before it.
    """

    ordered: IntArray
    offsets: IntArray
    alone: IntArray
    after: IntArray

    def each(self) -> Packs:
        """Returns a row for each bundle."""
        return Packs(offsets=self.offsets, documents=self.ordered)

    def fitted(self, capacity: int) -> Packs:
        """Returns rows of several bundles, none of which is torn apart."""
        packs = best_fit(_bundle_tokens(self.after, self.alone, self.offsets), capacity)
        counts = np.diff(self.offsets)[packs.documents]
        documents = [self.ordered[self.offsets[one] : self.offsets[one + 1]] for one in packs.documents.tolist()]
        return Packs(
            offsets=np.concatenate(([0], np.cumsum(counts)))[packs.offsets], documents=np.concatenate(documents)
        )


def branches_of_row(lengths: Sequence[int], reused: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Returns the tree that the documents of a row form, as runs of placed tokens in their order.

    Args:
        lengths: tokens of each document.
        reused: how many of its first ones each document reuses from the one before it; less than its length.

    Returns:
        tokens of each run; the run that each continues, or -1; and how many documents each is a part of.
    """
    cuts: list[set[int]] = [set() for _ in lengths]
    owners: list[int] = []
    path: list[int] = []
    for number, (length, begin) in enumerate(zip(lengths, reused, strict=True)):
        assert 0 <= begin < length, (begin, length)
        while path and reused[path[-1]] >= begin:
            path.pop()
        owners.append(path[-1] if begin else -1)
        if begin:
            assert begin < lengths[path[-1]], "a document reuses all of another"
            cuts[path[-1]].add(begin)
        else:
            path = []
        path.append(number)
    sizes: list[int] = []
    parents: list[int] = []
    ending: list[dict[int, int]] = []  # of each document, the run that ends before a token
    for number, (length, begin) in enumerate(zip(lengths, reused, strict=True)):
        parent = ending[owners[number]][begin] if begin else -1
        ends: dict[int, int] = {}
        for end in sorted({*cuts[number], length}):
            ends[end] = len(sizes)
            parents.append(parent)
            sizes.append(end - begin)
            parent, begin = len(sizes) - 1, end
        ending.append(ends)
    counts = [0] * len(sizes)
    for ends, length in zip(ending, lengths, strict=True):
        run = ends[length]
        while run >= 0:
            counts[run] += 1
            run = parents[run]
    return sizes, parents, counts


class Trees:
    """The documents of a micro-batch as attention takes them, row by row, where some may continue others.

    Args:
        size: rows, and columns of each, to whose end its last document extends.

    Attributes:
        lengths: of the documents.
        parents: the document that each one continues; empty as long as none does. See `engine.branches`.
        counts_BS: float32, how many documents of the data set each token is a part of.
    """

    def __init__(self, size: tuple[int, int]) -> None:
        self.lengths: list[int] = []
        self.parents: list[int] = []
        self.counts_BS = np.ones(size, dtype=np.float32)

    def add_row(self, row: int, lengths: Sequence[int], reused: Sequence[int]) -> list[int]:
        """Adds the next row; returns the number of each document's first run.

        Args:
            row: its number.
            lengths, reused: as of `branches_of_row`; none for a filler.
        """
        first, columns = len(self.lengths), self.counts_BS.shape[1]
        if any(reused):
            sizes, parents, counts = branches_of_row(lengths, reused)
            self.parents += [-1] * (first - len(self.parents))
            self.parents += [parent if parent < 0 else parent + first for parent in parents]
            held = np.repeat(np.array(counts, dtype=np.float32), sizes)
            self.counts_BS[row, : len(held)] = held
        else:
            sizes = list(lengths) or [columns]
            self.parents += [-1] * len(sizes) if self.parents else []
        numbers = {begin: number for number, begin in enumerate(accumulate(sizes, initial=0), first)}
        sizes[-1] += columns - sum(sizes)
        self.lengths += sizes
        placed = accumulate((length - less for length, less in zip(lengths, reused, strict=True)), initial=0)
        return [numbers[begin] for begin, _ in zip(placed, lengths, strict=False)]
