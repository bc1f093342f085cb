"""Judgements of answers: of one document, as columns of a data set, and as the part of a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import InputRank
from engine.data.dataset import TokenDataset
from engine.data.extras import DocumentExtras, ExtraColumns
from engine.data.parts import CollatedRows, NumberedDocuments
from engine.preferences.batch_parts import Answers


@dataclass(frozen=True, slots=True)
class Judgement(DocumentExtras):
    """The judgement of one answer.

    Args:
        sign: 1 for an answer that was preferred, -1 for one that was not.
    """

    sign: int

    def cut(self, start: int, end: int) -> Judgement:
        return self

    @classmethod
    def columns(cls, documents: Sequence[Self | None]) -> AnswerColumns:
        signs = [judgement.sign for judgement in documents if judgement is not None]
        assert len(signs) == len(documents), "all documents are answers, or none"
        return AnswerColumns(signs=np.array(signs, dtype=np.float32))


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerColumns(ExtraColumns):
    """The judgements of all answers, D of them.

    Args:
        signs: float32 [D], 1 for liked and -1 for disliked answers. A group of 2 has one of each.
        reference_logps: float32 [D], log-likelihood of each answer under the reference; None where it was not computed
            before training.
    """

    signs: NDArray[np.float32]
    reference_logps: NDArray[np.float32] | None = None
    collector: ClassVar[str] = "engine.preferences.data.answer_columns:RowAnswers"
    counts_documents: ClassVar[bool] = True
    can_share: ClassVar[bool] = True
    hashed_again: ClassVar[bool] = True

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        known = {} if self.reference_logps is None else {"reference_logps": self.reference_logps}
        return {"signs": self.signs, **known}

    def identity(self) -> Iterator[NDArray[np.float32]]:
        yield self.signs

    def fits(self, num_documents: int, num_tokens: int) -> bool:
        return len(self.signs) == num_documents

    @classmethod
    def joined(cls, parts: Sequence[AnswerColumns], counts: Sequence[int]) -> AnswerColumns:
        return cls(signs=np.concatenate([part.signs for part in parts]))


def answer_columns(dataset: TokenDataset) -> AnswerColumns:
    """Returns the judgements of a data set of answers."""
    columns = dataset.extra(AnswerColumns)
    assert columns is not None, "documents that are no answers"
    return columns


def put_reference(dataset: TokenDataset, logps: NDArray[np.float32]) -> None:
    """Gives a data set of answers their log-likelihoods under the reference, float32 [D]."""
    dataset.put(replace(answer_columns(dataset), reference_logps=logps))


class RowAnswers(NumberedDocuments):
    """Collects the answers of a micro-batch; see `engine.data.parts.PartCollector`."""

    def __init__(self, dataset: TokenDataset, input_rank: InputRank) -> None:
        super().__init__()
        self._columns = answer_columns(dataset)

    def finish(self, rows: CollatedRows) -> tuple[Answers]:
        """Returns the answers, with the number of the one that each token belongs to."""
        documents, known = self.documents, self._columns.reference_logps
        ids_BS, lengths = self.numbered(rows)
        answers = Answers(
            ids_BS=torch.from_numpy(ids_BS),
            signs=torch.from_numpy(self._columns.signs[documents]),
            lengths=torch.from_numpy(lengths),
            documents=tuple(documents),
            reference_logps=None if known is None else torch.from_numpy(known[documents]),
        )
        return (answers,)
