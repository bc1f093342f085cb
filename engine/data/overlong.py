"""Decides about records that are longer than a row (data.overlong), for records of every kind.

A record is one document or several side by side (a pair of answers is two), which are kept or dropped together. The
decision follows from the lengths of its documents and from where their targets are; a `RecordKind` says what holds for
one kind of records. Readers hand in documents (`LongRecords.fit`), token stores arrays (`LongRecords.decide`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from engine.data.columns import sum_rows
from engine.data.data_report import DatasetReport, Unit
from engine.data.document import Document

BoolArray = NDArray[np.bool_]


class Fate(IntEnum):
    """What becomes of a record: it is kept, or why it is not."""

    KEPT = 0
    OVERLONG = 1
    """It is longer than a row, and data.overlong is drop or error."""
    UNCUTTABLE = 2
    """It has images, and would be cut into several documents."""
    IN_IMAGE = 3
    """Truncation would cut through an image."""
    PROMPT_ONLY = 4
    """Truncation leaves no target."""
    WITHOUT_TARGET = 5
    """A document of it has no target."""
    ALIKE = 6
    """Its documents are the same once they are truncated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordKind:
    """Facts about one kind of records.

    Args:
        unit: its name in reports.
        fates: why its records are dropped or refused; the first that holds is reported.
        subject: begins the sentence that refuses a long record.
        width: documents of a record.
        ways: values of data.overlong beside "error" that it knows; others count as the first.
        refusal: the sentence that refuses a long record; with {subject}, {length}, {limit} and {ways}.
        cuts_later: whether kept documents stay whole, because the reader makes others of them before it truncates.
    """

    unit: Unit
    fates: tuple[Fate, ...]
    subject: str
    width: int = 1
    ways: tuple[str, ...] = ("truncate", "drop")
    refusal: str = (
        "{subject} {length} tokens, more than data.seq_length {limit}; raise it, or set data.overlong to {ways}."
    )
    cuts_later: bool = False

    def refuse(self, length: int, limit: int) -> str:
        """Returns the sentence that refuses a record.

        Args:
            length: tokens of its longest document.
            limit: maximum tokens of a document.
        """
        *others, last = self.ways
        ways = f"{', '.join(others)} or {last}" if others else last
        return self.refusal.format(subject=self.subject, length=length, limit=limit, ways=ways)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measures:
    """What decides about G records of W documents each.

    Args:
        lengths: int64 [G, W], tokens.
        has_targets: bool [G, W], whether any token is a target.
        keeps_targets: bool [G, W], whether one is that truncation keeps.
        has_images: bool [G, W].
        cuts_image: bool [G, W], whether truncation cuts through an image.
        alike: bool [G], whether all documents are the same once they are truncated.
    """

    lengths: NDArray[np.int64]
    has_targets: BoolArray
    keeps_targets: BoolArray
    has_images: BoolArray
    cuts_image: BoolArray
    alike: BoolArray

    @classmethod
    def of_lengths(cls, lengths: NDArray[np.int64], keeps_targets: BoolArray) -> Measures:
        """Returns the measures of single documents without images.

        Args:
            lengths: int64 [D].
            keeps_targets: bool [D], whether any token is a target that truncation keeps.
        """
        lengths, keeps_targets = lengths[:, None], keeps_targets[:, None]
        none = np.zeros_like(keeps_targets)
        return cls(
            lengths=lengths,
            has_targets=keeps_targets,
            keeps_targets=keeps_targets,
            has_images=none,
            cuts_image=none,
            alike=none[:, 0],
        )

    @classmethod
    def of_documents(cls, documents: Sequence[Document], limit: int, width: int) -> Measures:
        """Returns the measures of documents, `width` of which are a record."""
        lengths = np.array([len(one.tokens) for one in documents], dtype=np.int64)
        targets = np.concatenate([one.targets for one in documents])
        has_targets = sum_rows(targets, np.concatenate([[0], np.cumsum(lengths)])) > 0
        has_images = np.array([any(extra.has_images for extra in one.extras) for one in documents], dtype=bool)
        keeps_targets, cuts_image = has_targets.copy(), np.zeros(len(documents), dtype=bool)
        for at in (lengths > limit).nonzero()[0].tolist():
            keeps_targets[at] = documents[at].targets[:limit].any()
            cuts_image[at] = documents[at].beginning(limit) is None
        alike = np.zeros(len(documents) // width, dtype=bool)
        if width > 1:
            alike[:] = [_alike(documents[at : at + width], limit) for at in range(0, len(documents), width)]
        shape = (-1, width)
        return cls(
            lengths=lengths.reshape(shape),
            has_targets=has_targets.reshape(shape),
            keeps_targets=keeps_targets.reshape(shape),
            has_images=has_images.reshape(shape),
            cuts_image=cuts_image.reshape(shape),
            alike=alike,
        )


def _alike(documents: Sequence[Document], limit: int) -> bool:
    first, *others = (one.tokens[:limit] for one in documents)
    return all(np.array_equal(first, other) for other in others)


class LongRecords:
    """Decides about the records of a data set, and counts what becomes of them.

    Args:
        kind: of the records.
        limit: maximum tokens of a document.
        overlong: what happens to a longer one, one of `engine.config.data.OVERLONG`: "truncate" keeps its beginning,
            "cut" makes several of it, "drop" drops its record, "error" refuses it.
        concatenates: whether documents are concatenated and continue in the next row, so that none is too long unless
            it is to be dropped or refused. A .txt stream always continues.
    """

    def __init__(self, kind: RecordKind, *, limit: int, overlong: str, concatenates: bool = False) -> None:
        self._kind, self._limit, self._concatenates = kind, limit, concatenates
        self._overlong = overlong if overlong in (*kind.ways, "error") else kind.ways[0]
        self._counts = np.zeros(len(Fate), dtype=np.int64)
        self._longest = self._truncated = self._lost = self._cut = self._pieces = 0
        self._first_in_image = ""

    def decide(self, measures: Measures, limit: int | None = None) -> NDArray[np.int64]:
        """Returns the fate of each record, int64 [G], and counts it; refusing is left to the caller.

        Args:
            limit: in place of the data set's.
        """
        limit = self._limit if limit is None else limit
        longer, is_long = measures.lengths > limit, (measures.lengths > limit).any(axis=1)
        truncates, has_images = self._overlong == "truncate", measures.has_images.any(axis=1)
        holds = {
            Fate.OVERLONG: is_long & (self._overlong in ("drop", "error")),
            Fate.UNCUTTABLE: has_images & (self._concatenates | (is_long & (self._overlong == "cut"))),
            Fate.IN_IMAGE: measures.cuts_image.any(axis=1) & truncates,
            Fate.PROMPT_ONLY: (longer & ~measures.keeps_targets).any(axis=1) & truncates,
            Fate.WITHOUT_TARGET: ~measures.has_targets.all(axis=1),
            Fate.ALIKE: measures.alike,
        }
        fates = np.select([holds[fate] for fate in self._kind.fates], self._kind.fates, default=Fate.KEPT)
        self._counts += np.bincount(fates, minlength=len(Fate))
        self._longest = max(self._longest, int(measures.lengths.max(initial=0)))
        kept = is_long & (fates == Fate.KEPT)
        if truncates:
            self._truncated += int(kept.sum())
            self._lost += int(np.maximum(measures.lengths[kept] - limit, 0).sum())
        else:
            self._cut += int(kept.sum())
        return fates

    def fit(self, documents: Sequence[Document]) -> list[Document]:
        """Returns the documents of one file that are kept, those of a record side by side, none longer than a row.

        Raises:
            UserError: a record is too long; names file and record.
        """
        if not documents:
            return []
        limit, width = self._limit, self._kind.width
        is_stream = documents[0].place.path.suffix.lower() == ".txt"
        if self._concatenates and (is_stream or self._overlong in ("truncate", "cut")):
            limit = sys.maxsize  # documents of this file continue in the next row
        measures = Measures.of_documents(documents, limit, width)
        fates = self.decide(measures, limit)
        if not fates.any() and measures.lengths.max() <= limit:
            self._pieces += len(documents)
            return list(documents)
        kept: list[Document] = []
        for number, fate in enumerate(fates.tolist()):
            record = documents[number * width : (number + 1) * width]
            if fate == Fate.KEPT:
                for document in record:
                    kept += self._pieces_of(document, limit)
            else:
                self._drop(fate, record)
        self._pieces += len(kept)
        return kept

    def count_pieces(self, pieces: int) -> None:
        """Adds pieces that documents were cut into elsewhere."""
        self._pieces += pieces

    def report(self, records: int) -> DatasetReport:
        """Returns the report on all records so far.

        Args:
            records: how many were read; 0 for a token store.
        """
        counts = self._counts.tolist()
        return DatasetReport(
            unit=self._kind.unit,
            limit=self._limit,
            records=records,
            documents=counts[Fate.KEPT],
            pieces=self._pieces if self._cut else 0,
            longest=self._longest,
            truncated=self._truncated,
            lost_tokens=self._lost,
            dropped_overlong=counts[Fate.OVERLONG],
            dropped_prompt_only=counts[Fate.PROMPT_ONLY],
            dropped_without_target=counts[Fate.WITHOUT_TARGET],
            dropped_alike=counts[Fate.ALIKE],
            dropped_in_image=counts[Fate.IN_IMAGE],
            first_in_image=self._first_in_image,
        )

    def _drop(self, fate: int, record: Sequence[Document]) -> None:
        """Notes where a record would be cut in an image, and refuses one that must not be dropped."""
        place, length = record[0].place, max(len(document.tokens) for document in record)
        if fate == Fate.OVERLONG and self._overlong == "error":
            raise place.error(self._kind.refuse(length, self._limit))
        if fate == Fate.UNCUTTABLE and self._concatenates:
            raise place.error(
                "the conversation is for a vision-language model, but data.packing concatenate cuts documents "
                "anywhere, images too; set data.packing to true."
            )
        if fate == Fate.UNCUTTABLE:
            raise place.error(
                f"the record has {length} tokens, more than data.seq_length {self._limit}, and a "
                "conversation for a vision-language model cannot be cut into several; set data.overlong to truncate "
                "or drop."
            )
        if fate == Fate.IN_IMAGE:
            self._first_in_image = self._first_in_image or str(place)

    def _pieces_of(self, document: Document, limit: int) -> list[Document]:
        if len(document.tokens) <= limit or self._kind.cuts_later:
            return [document]
        if self._overlong == "cut":
            return [piece for piece in document.cut(limit) if piece.targets.any()]
        beginning = document.beginning(limit)
        assert beginning is not None, "an image would be cut"
        return [beginning]
