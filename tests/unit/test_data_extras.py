"""Extras of documents: they are carried wherever a document is cut, or the cut is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.data.columns import Columns
from engine.data.concatenate import concatenate
from engine.data.document import Document
from engine.data.extras import DocumentExtras, ExtraColumns
from engine.data.overlong import LongRecords
from engine.data.record_files import Place
from engine.data.text_reader import TEXT
from engine.errors import UserError
from engine.vision.data.columns import Extras

PLACE = Place(Path("records.jsonl"), "line", 1)


@dataclass(frozen=True, slots=True)
class Marks(DocumentExtras):
    """A number for each token."""

    numbers: tuple[int, ...]

    def cut(self, start: int, end: int) -> Marks:
        return Marks(self.numbers[start:end])

    @classmethod
    def columns(cls, documents: Sequence[Marks | None]) -> MarkColumns:
        return MarkColumns(numbers=np.array([number for one in documents if one for number in one.numbers]))


@dataclass(frozen=True, kw_only=True, slots=True)
class MarkColumns(ExtraColumns):
    numbers: NDArray[np.int64]

    def arrays(self) -> dict[str, NDArray[np.int64]]:
        return {"numbers": self.numbers}

    def identity(self) -> Iterator[NDArray[np.int64]]:
        yield self.numbers

    def fits(self, num_documents: int, num_tokens: int) -> bool:
        return len(self.numbers) == num_tokens

    @classmethod
    def joined(cls, parts: Sequence[MarkColumns], counts: Sequence[int]) -> MarkColumns:
        return cls(numbers=np.concatenate([part.numbers for part in parts]))


def document(length: int, *extras: DocumentExtras) -> Document:
    return Document(PLACE, np.arange(length, dtype=np.int32), np.arange(length) > 0, extras)


def marked(length: int) -> Document:
    return document(length, Marks(tuple(range(length))))


def test_pieces_carry_their_extras() -> None:
    for pieces in (list(marked(10).cut(4)), [marked(10).beginning(4)]):
        for piece in pieces:
            assert piece is not None and piece.extras == (Marks(tuple(piece.tokens.tolist())),)


@pytest.mark.parametrize("concatenates", [False, True])
def test_only_images_cannot_be_cut(concatenates: bool) -> None:
    long = LongRecords(TEXT, limit=4, overlong="cut", concatenates=concatenates)
    assert len(long.fit([marked(10)])) == (1 if concatenates else 3)
    with pytest.raises(UserError, match="a conversation for a vision-language model|the conversation is for a vision"):
        long.fit([document(10, Extras())])
    with pytest.raises(AssertionError, match="cannot be cut into several"):
        list(document(10, Extras()).cut(4))


def test_columns_join_extras_and_concatenation_refuses_them() -> None:
    columns = Columns.joined([Columns.of_documents([marked(3), marked(2)]), Columns.of_documents([marked(4)])])
    (extra,) = columns.extras
    assert isinstance(extra, MarkColumns) and extra.numbers.tolist() == columns.tokens.tolist()
    assert columns.starts.tolist() == [0, 3, 5] and columns.lengths.tolist() == [3, 2, 4]
    with pytest.raises(AssertionError, match="whole documents"):
        concatenate(columns, 4)
