"""Documents as flat arrays, and their arrangement in rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.data.document import Document
from engine.data.extras import ExtraColumns, extra_columns, joined_extras
from engine.data.packing import Packs, one_each, pack
from engine.kernels.native import packing as native_packing
from engine.kernels.native.loader import native_status


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """D documents, with T tokens in all.

    Args:
        tokens: integer [T], the documents end to end; other tokens may lie between them.
        targets: bool [T], whether a token is a target; None where all are. A document's first token never is: there
            is nothing to predict it from.
        starts: int64 [D], where documents begin.
        lengths: int64 [D], tokens of each.
        target_counts: int64 [D], target tokens of each.
        max_token: the largest id, or -1.
        identity: changes with the content of the arrays, for those that must not be read as a whole, because they are
            mapped from files; None where they are in memory.
        group: documents that belong together, side by side in one row: 2 for pairs of answers, else 1.
        extras: what the documents have beside their tokens, at most one of each class.
    """

    tokens: NDArray[np.integer]
    targets: NDArray[np.bool_] | None
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    target_counts: NDArray[np.int64]
    max_token: int
    identity: str | None = None
    group: int = 1
    extras: tuple[ExtraColumns, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.lengths) % self.group == 0, (len(self.lengths), self.group)

    @classmethod
    def of_documents(cls, documents: Sequence[Document], *, group: int = 1) -> Columns:
        """Returns the columns of some documents, at least one."""
        return contiguous(
            np.concatenate([document.tokens for document in documents]),
            np.concatenate([document.targets for document in documents]),
            np.cumsum([0, *(len(document.tokens) for document in documents)], dtype=np.int64),
            group=group,
            extras=extra_columns([document.extras for document in documents]),
        )

    @classmethod
    def joined(cls, parts: Sequence[Columns]) -> Columns:
        """Returns several columns in memory, each of documents that lie end to end, one after another."""
        ends, counts = np.cumsum([len(part.tokens) for part in parts]), [len(part.lengths) for part in parts]
        bases = [0, *ends[:-1].tolist()]
        return cls(
            tokens=np.concatenate([part.tokens for part in parts]),
            targets=np.concatenate([part.targets for part in parts if part.targets is not None]),
            starts=np.concatenate([part.starts + base for part, base in zip(parts, bases, strict=True)]),
            lengths=np.concatenate([part.lengths for part in parts]),
            target_counts=np.concatenate([part.target_counts for part in parts]),
            max_token=max(part.max_token for part in parts),
            group=parts[0].group,
            extras=joined_extras([part.extras for part in parts], counts),
        )

    def rows(self, capacity: int, *, packing: bool, sizes: NDArray[np.int64] | None = None) -> Packs:
        """Returns which documents are in which row, which their lengths alone decide.

        Args:
            capacity: tokens of a row.
            packing: whether rows hold several groups of documents.
            sizes: int64 [groups], the length of each group for packing; None for its tokens.
        """
        if sizes is None:
            sizes = self.lengths.reshape(-1, self.group).sum(axis=1)
        packs = best_fit(sizes, capacity) if packing else one_each(len(sizes))
        return packs.of_groups(self.group)


def contiguous(
    tokens: NDArray[np.integer],
    targets: NDArray[np.bool_],
    offsets: NDArray[np.int64],
    *,
    group: int = 1,
    extras: Sequence[ExtraColumns] = (),
) -> Columns:
    """Returns the columns of documents that lie end to end in memory.

    Args:
        tokens: integer [T].
        targets: bool [T], false on the first token of each document.
        offsets: int64 [D + 1], where documents begin; none is empty.
        group, extras: as in `Columns`.
    """
    assert offsets[0] == 0 and len(tokens) == len(targets) == offsets[-1], (len(tokens), len(targets))
    assert not targets[offsets[:-1]].any(), "the first token of a document has nothing to be predicted from"
    assert all(extra.fits(len(offsets) - 1, len(tokens)) for extra in extras), extras
    counts = sum_rows(targets, offsets)
    max_token = int(tokens.max()) if len(tokens) else -1
    return Columns(
        tokens=tokens.astype(np.uint16 if max_token < 1 << 16 else np.int32, copy=False),
        targets=targets,
        starts=offsets[:-1],
        lengths=np.diff(offsets),
        target_counts=counts + sum(extra.label_counts() for extra in extras),
        max_token=max_token,
        group=group,
        extras=tuple(extras),
    )


def sum_rows(values: NDArray[np.integer] | NDArray[np.bool_], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns int64 [R], the sums of the values from each offset to the next."""
    sums = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=sums[1:])
    return sums[offsets[1:]] - sums[offsets[:-1]]


def best_fit(lengths: NDArray[np.int64], capacity: int) -> Packs:
    """Returns `engine.data.packing.pack`, by the compiled code where it is built: the same rows in less time."""
    if not native_status().available:
        return pack(lengths, capacity)
    offsets, documents = native_packing.pack(lengths, capacity)
    return Packs(offsets=offsets, documents=documents)
