"""Pairs of answers for a reward model: records of every form that `engine.preferences.data.preference_pairs` reads,
with a `margin` where they have one, and data sets of such pairs.

The score of an answer is that of the last token of its document that is no padding token. So it is in transformers,
which finds the end of a text by that token: where a tokenizer pads with its end token, the end tokens that close a text
count as padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import InputRank
from engine.data.dataset import TokenDataset
from engine.data.document import Document
from engine.data.extras import DocumentExtras, ExtraColumns
from engine.data.overlong import Fate, RecordKind
from engine.data.parts import CollatedRows, NumberedDocuments
from engine.data.record_files import Place, Record
from engine.judges.batch_parts import ScoredAnswers
from engine.preferences.data.answers import AnswerReader
from engine.preferences.data.preference_pairs import Pair, parse_pair


@dataclass(frozen=True, slots=True)
class MarginPair:
    """Two answers to one question.

    Args:
        pair: the answers.
        margin: by which the preferred one is to be ahead.
    """

    pair: Pair
    margin: float

    @property
    def samples(self) -> tuple[object, ...]:
        return self.pair.samples


@dataclass(frozen=True, slots=True)
class Scored(DocumentExtras):
    """The place of one answer's score.

    Args:
        last: the token that has it, counted from the document's first.
        margin: of the answer's pair.
    """

    last: int
    margin: float

    def cut(self, start: int, end: int) -> Scored | None:
        return None

    @classmethod
    def columns(cls, documents: Sequence[Self | None]) -> ScoredColumns:
        found = [one for one in documents if one is not None]
        assert len(found) == len(documents), "all documents are answers, or none"
        return ScoredColumns(
            last=np.array([one.last for one in found], dtype=np.int32),
            margins=np.array([one.margin for one in found], dtype=np.float32),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredColumns(ExtraColumns):
    """The same of all answers, D of them: int32 [D] and float32 [D]."""

    last: NDArray[np.int32]
    margins: NDArray[np.float32]
    collector: ClassVar[str] = "engine.judges.pairs:RowScores"
    counts_documents: ClassVar[bool] = True
    can_share: ClassVar[bool] = True
    hashed_again: ClassVar[bool] = True

    def arrays(self) -> dict[str, NDArray[np.int32] | NDArray[np.float32]]:
        return {"last": self.last, "margins": self.margins}

    def identity(self) -> Iterator[NDArray[np.int32] | NDArray[np.float32]]:
        yield self.last
        yield self.margins

    def shareable(self) -> NDArray[np.int64]:
        """Returns the tokens up to the one that has the score: it may be the last that answers have in common."""
        return self.last.astype(np.int64) + 1

    def fits(self, num_documents: int, num_tokens: int) -> bool:
        return len(self.last) == len(self.margins) == num_documents

    @classmethod
    def joined(cls, parts: Sequence[ScoredColumns], counts: Sequence[int]) -> ScoredColumns:
        return cls(
            last=np.concatenate([part.last for part in parts]),
            margins=np.concatenate([part.margins for part in parts]),
        )


class RowScores(NumberedDocuments):
    """Collects the answers of a micro-batch; see `engine.data.parts.PartCollector`."""

    def __init__(self, dataset: TokenDataset, input_rank: InputRank) -> None:
        super().__init__()
        columns = dataset.extra(ScoredColumns)
        assert columns is not None, "documents that are no answers"
        self._columns = columns

    def finish(self, rows: CollatedRows) -> tuple[ScoredAnswers]:
        """Returns the answers, with the places of their scores."""
        numbers_BS = np.full(rows.labels_BS.shape, -1, dtype=np.int64)
        for number, placed in enumerate(self.placed):
            column = placed.start + self._columns.last[placed.document] - placed.skipped
            numbers_BS[placed.row, column] = number
        margins = self._columns.margins[self.documents[::2]]
        return (ScoredAnswers(numbers_BS=torch.from_numpy(numbers_BS), margins=torch.from_numpy(margins)),)


def parse_margin_pair(place: Place, record: Record) -> MarginPair:
    """Parses a pair with its margin, 0 where the record has none.

    Raises:
        UserError: a malformed record: names file, record and field.
    """
    margin = record.get("margin")
    if margin is None:
        return MarginPair(parse_pair(place, record), 0.0)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise place.error(f"field 'margin' is {margin!r}, expected a number; correct the record.")
    return MarginPair(parse_pair(place, record), float(margin))


class ScoredPairReader(AnswerReader[MarginPair]):
    """Reads pairs: the preferred answer and then the other one, in one row. None is cut: what would be scored of it is
    its end."""

    kind = RecordKind(
        unit="pair",
        subject="an answer with its question has",
        width=2,
        ways=("drop",),
        fates=(Fate.OVERLONG, Fate.WITHOUT_TARGET, Fate.ALIKE),
    )
    expects = "nothing to compare"

    def parse(self, place: Place, record: Record) -> MarginPair:
        return parse_margin_pair(place, record)

    def judge(self, record: MarginPair, documents: tuple[Document, ...]) -> Sequence[Document]:
        padding = self._tokenizer.padding_id
        return [
            replace(one, extras=(Scored(last_token(one.tokens, padding), record.margin), *one.extras))
            for one in documents
        ]


def last_token(tokens: NDArray[np.int32], padding: int | None) -> int:
    """Returns the place of the last token that is no padding; 0 where all are."""
    if padding is None:
        return len(tokens) - 1
    others = np.flatnonzero(tokens != padding)
    return int(others[-1]) if len(others) else 0
