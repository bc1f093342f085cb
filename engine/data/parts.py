"""The parts of a micro-batch that come from a data set: one collector for each kind of data that its documents have
beside their tokens, in the wing that reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.batch import IGNORE_LABEL, BatchPart, InputRank
from engine.seams import resolve

if TYPE_CHECKING:
    from engine.data.dataset import TokenDataset


class PlacedDocument(NamedTuple):
    """A document of a micro-batch.

    Args:
        document: its number in the data set.
        number: its number in `Batch.document_lengths`.
        row, start: its row, and its first column there.
        first_token: its first token among the T of the micro-batch.
        dropout_index: the dropout coordinate of its first token.
        tokens: whole numbers [length], its ids.
        labels: int64 [length], what its positions must predict; a collector may write other labels.
        skipped: tokens at its beginning that are another document's too and were placed with that one; all else here is
            of the tokens behind them.
    """

    document: int
    number: int
    row: int
    start: int
    first_token: int
    dropout_index: int
    tokens: NDArray[Any]
    labels: NDArray[np.int64]
    skipped: int = 0

    @property
    def length(self) -> int:
        return len(self.labels)


class CollatedRows(NamedTuple):
    """The rows of a micro-batch, with all of their documents.

    Args:
        labels_BS: int64, as in `Batch`.
        positions_DBS: int64, the positions of all tokens, in D kinds.
    """

    labels_BS: NDArray[np.int64]
    positions_DBS: NDArray[np.int64]


class PartCollector(Protocol):
    """Collects the documents of one micro-batch, and makes the parts that they bring."""

    position_kinds: int
    """D, the kinds of positions of `add`: 1, or 3 for time, height and width."""

    def add(self, placed: PlacedDocument) -> NDArray[np.int64] | None:
        """Adds a document.

        Returns:
            The positions of its tokens, int64 [length] or [D, length]; None for those from 0.
        """
        ...

    def finish(self, rows: CollatedRows) -> tuple[BatchPart, ...]:
        """Returns the parts, after the last document."""
        ...


def collectors(dataset: TokenDataset, input_rank: InputRank) -> list[PartCollector]:
    """Returns a collector for each kind of data that the documents have beside their tokens."""
    found = [extra.collector for extra in dataset.extras if extra.collector is not None]
    assert dataset.family is not None or len(found) == len(dataset.extras), "images need a family that reads them"
    if dataset.family is not None:
        found.append(dataset.family.collector)
    return [resolve(name)(dataset, input_rank) for name in found]


class NumberedDocuments:
    """Numbers documents in the order in which they come; a collector's base where the loss is of whole documents.

    Attributes:
        placed: the documents.
    """

    position_kinds: ClassVar[int] = 1

    def __init__(self) -> None:
        self.placed: list[PlacedDocument] = []

    def add(self, placed: PlacedDocument) -> None:
        """Adds a document."""
        self.placed.append(placed)

    @property
    def documents(self) -> list[int]:
        """The number of each document in the data set."""
        return [one.document for one in self.placed]

    def spans(self) -> Iterator[tuple[PlacedDocument, slice]]:
        """Yields each document and the columns of its row that it fills."""
        for placed in self.placed:
            yield placed, slice(placed.start, placed.start + placed.length)

    def numbered(self, rows: CollatedRows) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Returns [B, S] the number of each token's document, 0 for padding, and [N] the target tokens of each."""
        ids_BS = np.zeros(rows.labels_BS.shape, dtype=np.int64)
        for number, (placed, columns) in enumerate(self.spans()):
            ids_BS[placed.row, columns] = number
        counts = np.bincount(ids_BS[rows.labels_BS != IGNORE_LABEL], minlength=len(self.placed))
        return ids_BS, counts.astype(np.float32)
