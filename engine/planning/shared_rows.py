"""The rows of documents that begin alike (`engine.data.prefixes`), made of documents that have lengths and no meaning.

The data's own code arranges them, so that nothing here knows which documents share a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from engine.branches import Parents
from engine.data.columns import contiguous
from engine.data.dataset import TokenDataset
from engine.data.prefixes import branches_of_row


class RowSharing(Protocol):
    """A run's choice to share beginnings, such as `engine.training.prefixes.PrefixSharing`; hashable."""

    def rows(self, dataset: TokenDataset, *, ranks: int = 1) -> TokenDataset:
        """Returns the data set in rows that share what they may, or as it is."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedRows:
    """The rows of a step over all data-parallel ranks.

    Args:
        count: of rows.
        tokens: in them, without padding.
        alone: tokens of the same documents, each with its beginning.
        length: of a row, with its padding where rows are packed; else of the longest.
        lengths, parents: the documents of the longest row; see `engine.branches`.
    """

    count: int
    tokens: int
    alone: int
    length: int
    lengths: tuple[int, ...]
    parents: Parents


@dataclass(frozen=True, kw_only=True, slots=True)
class AlikeDocuments:
    """The documents of a step, groups of which begin alike.

    Args:
        sharing: whether they may share rows.
        groups: of documents, over all ranks.
        members: documents of a group.
        common: tokens that all of a group begin with.
        own: tokens of each behind them.
        capacity: tokens of a row.
        packing: whether rows hold several samples.
        is_sample: whether a group is one sample, as a pair of answers is.
    """

    sharing: RowSharing
    groups: int
    members: int
    common: int
    own: int
    capacity: int
    packing: bool
    is_sample: bool = False

    def rows(self, ranks: int) -> SharedRows | None:
        """Returns the rows of so many data-parallel ranks; None where nothing is shared."""
        return _rows(self, ranks)


@lru_cache(maxsize=64)
def _rows(alike: AlikeDocuments, ranks: int) -> SharedRows | None:
    count, length = alike.groups * alike.members, alike.common + alike.own
    document = np.arange(count, dtype=np.int32)
    tokens = np.repeat(document[:, None] // alike.members, length, axis=1)
    tokens[:, alike.common :] = alike.groups + document[:, None] % alike.members
    targets = np.broadcast_to(np.arange(length) >= max(1, alike.common), tokens.shape)
    columns = contiguous(
        tokens.ravel(),
        targets.ravel(),
        np.arange(count + 1, dtype=np.int64) * length,
        group=alike.members if alike.is_sample else 1,
    )
    plain = TokenDataset(columns, seq_length=alike.capacity, packing=alike.packing)
    found = alike.sharing.rows(plain, ranks=ranks)
    if found.rows.reused is None:
        return None
    longest = int(found.row_lengths.argmax())
    lengths = found.lengths[found.rows.row(longest)].tolist()
    sizes, parents, _ = branches_of_row(lengths, found.rows.reused_in(longest).tolist())
    return SharedRows(
        count=len(found),
        tokens=int(found.row_lengths.sum()),
        alone=int(plain.row_lengths.sum()),
        length=alike.capacity if alike.packing else int(found.row_lengths[longest]),
        lengths=tuple(sizes),
        parents=tuple(parents),
    )
