"""What documents have beside their tokens, for runs that have such: images of a model, what is known of completions.

The core carries it from records to batches without knowing it: a class beside the code that reads it says how it is
cut, stored and collated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

Span = tuple[int, int]
"""[start, end) of tokens of a document."""
Extra = TypeVar("Extra", bound="ExtraColumns")


class DocumentExtras(Protocol):
    """What one document has beside its tokens."""

    def cut(self, length: int) -> Self | None:
        """Returns what the first tokens of the document have; None where they must not be cut there."""
        ...

    def columns(self, documents: Sequence[Any]) -> ExtraColumns:
        """Returns the extras of some documents as columns; of each its extras, or None where it has none."""
        ...


class ExtraColumns(ABC):
    """What the documents of a data set have beside their tokens, D documents with T tokens in all."""

    __slots__ = ()
    collector: ClassVar[str | None] = None
    """Collects it into batches, as "module:NAME"; see `engine.data.parts.PartCollector`. None for what the family of a
    vision-language model collects, which places features also where no document has images."""
    counts_documents: bool = False
    """Whether a row's weight in the loss is the number of its documents."""

    @abstractmethod
    def arrays(self) -> dict[str, NDArray[Any]]:
        """Returns the columns by name, which the constructor takes."""

    @abstractmethod
    def identity(self) -> Iterator[NDArray[Any]]:
        """Yields the arrays that training depends on."""

    def fits(self, num_documents: int, num_tokens: int) -> bool:
        """Returns whether these are columns of so many documents and tokens."""
        return True

    def label_counts(self) -> NDArray[np.int64] | int:
        """Returns int64 [D], labels of each document beside those of its targets; or 0."""
        return 0

    def feature_spans(self, document: int) -> list[Span]:
        """Returns the tokens of a document that features replace."""
        return []

    def feature_counts(self) -> NDArray[np.int64] | int:
        """Returns int64 [D], tokens of each document that features replace; or 0."""
        return 0

    @classmethod
    def joined(cls, parts: Sequence[Any], counts: Sequence[int]) -> Self:
        """Returns the columns of several data sets, one after another.

        Args:
            parts: of each; None where documents have tokens alone.
            counts: documents of each.
        """
        raise NotImplementedError(f"{cls.__name__} of several data sets")


def extra_columns(documents: Sequence[DocumentExtras | None]) -> tuple[ExtraColumns, ...]:
    """Returns the extras of some documents as columns."""
    first = next((extras for extras in documents if extras is not None), None)
    return () if first is None else (first.columns(documents),)
