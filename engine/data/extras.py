"""What documents have beside their tokens, for runs that have such: images of a model, judgements of answers, what is
known of completions.

The core carries it from records to batches without knowing it: a class beside the code that reads it says how it is
cut, stored and collated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

Span = tuple[int, int]
"""[start, end) of tokens of a document."""
Extra = TypeVar("Extra")


class DocumentExtras(ABC):
    """What one document has beside its tokens; of each class at most one."""

    __slots__ = ()
    has_images: ClassVar[bool] = False
    """Whether these are images, with which a document cannot be cut into several, nor concatenated."""

    @property
    def spans(self) -> list[Span]:
        """The tokens of the document that features replace."""
        return []

    @abstractmethod
    def cut(self, start: int, end: int) -> Self | None:
        """Returns what tokens [start, end) of the document have; None where they must not be cut there."""

    @classmethod
    @abstractmethod
    def columns(cls, documents: Sequence[Self | None]) -> ExtraColumns:
        """Returns the extras of some documents as columns; of each its extras, or None where it has none."""


class ExtraColumns(ABC):
    """What the documents of a data set have beside their tokens, D documents with T tokens in all."""

    __slots__ = ()
    collector: ClassVar[str | None] = None
    """Collects it into batches, as "module:NAME"; see `engine.data.parts.PartCollector`. None for what the family of a
    vision-language model collects, which places features also where no document has images."""
    counts_documents: bool = False
    """Whether a row's weight in the loss is the number of its documents, or of its groups of them."""
    can_share: ClassVar[bool] = False
    """Whether tokens before the first target of a document have nothing of it, so that documents that begin alike may
    share them (`engine.data.prefixes`)."""
    hashed_again: ClassVar[bool] = False
    """Whether a data set's fingerprint hashes it also where `Columns.identity` stands for the documents."""

    @abstractmethod
    def arrays(self) -> dict[str, NDArray[Any]]:
        """Returns the columns by name, which the constructor takes."""

    @abstractmethod
    def identity(self) -> Iterator[NDArray[Any]]:
        """Yields the arrays that training depends on."""

    def fits(self, num_documents: int, num_tokens: int) -> bool:
        """Returns whether these are columns of so many documents and tokens."""
        return True

    def shareable(self) -> NDArray[np.int64] | None:
        """Returns int64 [D], how many of each document's first tokens nothing but its targets keeps from being shared;
        None for all."""
        return None

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
        """Returns several columns, one after another.

        Args:
            parts: of each; None where documents have none.
            counts: documents of each.
        """
        raise NotImplementedError(f"several {cls.__name__}, one after another")


def extra_columns(documents: Sequence[tuple[DocumentExtras, ...]]) -> tuple[ExtraColumns, ...]:
    """Returns the extras of some documents as columns."""
    kinds = {type(extra): None for extras in documents for extra in extras}
    return tuple(kind.columns([extra_of(extras, kind) for extras in documents]) for kind in kinds)


def joined_extras(parts: Sequence[Sequence[ExtraColumns]], counts: Sequence[int]) -> tuple[ExtraColumns, ...]:
    """Returns the extras of several columns, one after another.

    Args:
        parts: of each.
        counts: documents of each.
    """
    kinds = {type(extra): None for extras in parts for extra in extras}
    return tuple(kind.joined([extra_of(extras, kind) for extras in parts], counts) for kind in kinds)


def extra_of(extras: Sequence[Any], kind: type[Extra]) -> Extra | None:
    """Returns the extras of exactly this class; None where there are none."""
    return next((extra for extra in extras if type(extra) is kind), None)
