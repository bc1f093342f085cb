"""A teacher's most likely tokens at each target token: of one document, as columns of a data set, and as the part of a
micro-batch.

Legend: E target tokens that have some, K tokens of each, B rows (micro-batch), S columns (row length).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import BatchPart, InputRank
from engine.data.dataset import TokenDataset
from engine.data.extras import DocumentExtras, ExtraColumns
from engine.data.parts import CollatedRows, NumberedDocuments

NO_TOKEN = -1
"""Fills up the tokens of a target that has fewer than others."""


@dataclass(frozen=True, slots=True)
class TopTokens(DocumentExtras):
    """The most likely tokens of a document's targets.

    Args:
        places: int64 [E], the target tokens in the document, rising.
        ids: int32 [E, K], or NO_TOKEN.
        logps: float32 [E, K] log-probabilities at temperature 1; -inf where there is no token.
    """

    places: NDArray[np.int64]
    ids: NDArray[np.int32]
    logps: NDArray[np.float32]

    def cut(self, start: int, end: int) -> TopTokens:
        kept = (self.places > start) & (self.places < end)  # the first token of a piece is no target
        return TopTokens(self.places[kept] - start, self.ids[kept], self.logps[kept])

    @classmethod
    def columns(cls, documents: Sequence[Self | None]) -> TopTokenColumns:
        found = [one for one in documents if one is not None]
        assert len(found) == len(documents), "all documents have a teacher's tokens, or none"
        return TopTokenColumns(
            places=np.concatenate([one.places for one in found]),
            ids=_stacked([one.ids for one in found], NO_TOKEN),
            logps=_stacked([one.logps for one in found], -np.inf),
            offsets=np.cumsum([0, *(len(one.places) for one in found)], dtype=np.int64),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TopTokenColumns(ExtraColumns):
    """The most likely tokens of all documents.

    Args:
        places, ids, logps: as of `TopTokens`, document after document.
        offsets: int64 [D + 1], where each document's begin.
    """

    places: NDArray[np.int64]
    ids: NDArray[np.int32]
    logps: NDArray[np.float32]
    offsets: NDArray[np.int64]
    collector: ClassVar[str] = "engine.distillation.top_tokens:RowTopTokens"
    hashed_again: ClassVar[bool] = True

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {"places": self.places, "ids": self.ids, "logps": self.logps, "offsets": self.offsets}

    def identity(self) -> Iterator[NDArray[Any]]:
        yield from self.arrays().values()

    def fits(self, num_documents: int, num_tokens: int) -> bool:
        return len(self.offsets) == num_documents + 1

    @classmethod
    def joined(cls, parts: Sequence[TopTokenColumns], counts: Sequence[int]) -> TopTokenColumns:
        before = np.cumsum([0, *(len(part.places) for part in parts)])
        starts = [part.offsets[:-1] + base for part, base in zip(parts, before, strict=False)]
        return cls(
            places=np.concatenate([part.places for part in parts]),
            ids=_stacked([part.ids for part in parts], NO_TOKEN),
            logps=_stacked([part.logps for part in parts], -np.inf),
            offsets=np.concatenate([*starts, before[-1:]]).astype(np.int64),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherTokens(BatchPart):
    """The teacher's most likely tokens at each position of a micro-batch, in the column of the label that they belong
    to.

    Args:
        ids_KBS: int32 global ids, or NO_TOKEN.
        logps_KBS: float32 log-probabilities at temperature 1; -inf where there is no token.
    """

    graphs_ignore: ClassVar[bool] = True
    for_loss_alone: ClassVar[bool] = True
    ids_KBS: Tensor
    logps_KBS: Tensor


class RowTopTokens(NumberedDocuments):
    """Collects the most likely tokens of a micro-batch; see `engine.data.parts.PartCollector`."""

    def __init__(self, dataset: TokenDataset, input_rank: InputRank) -> None:
        super().__init__()
        columns = dataset.extra(TopTokenColumns)
        assert columns is not None, "documents without a teacher's tokens"
        self._columns = columns

    def finish(self, rows: CollatedRows) -> tuple[TeacherTokens]:
        """Returns the part."""
        columns = self._columns
        shape = (*rows.labels_BS.shape, columns.ids.shape[1])
        ids_BSK = np.full(shape, NO_TOKEN, dtype=np.int32)
        logps_BSK = np.full(shape, -np.inf, dtype=np.float32)
        for placed, held in self.spans():
            assert not placed.skipped, "a teacher's tokens are not shared"
            own = slice(*columns.offsets[placed.document : placed.document + 2].tolist())
            before = held.start + columns.places[own] - 1
            ids_BSK[placed.row, before] = columns.ids[own]
            logps_BSK[placed.row, before] = columns.logps[own]
        ids_KBS, logps_KBS = (np.ascontiguousarray(np.moveaxis(one, 2, 0)) for one in (ids_BSK, logps_BSK))
        return (TeacherTokens(ids_KBS=torch.from_numpy(ids_KBS), logps_KBS=torch.from_numpy(logps_KBS)),)


def _stacked(parts: Sequence[NDArray[Any]], fill: float) -> NDArray[Any]:
    """Returns arrays [E, K] one after another, with the largest K."""
    width = max(part.shape[1] for part in parts)
    return np.concatenate([np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=fill) for part in parts])
