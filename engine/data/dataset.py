"""Tokenised documents and their arrangement in rows.

A `TokenDataset` is columns (`engine.data.columns`) and the list of rows. The row is the sample that the data order
counts: one document, or with packing one pack of documents. It knows nothing of records, batches, ranks or order;
`engine.data.build` reads it from files, and `engine.data.loader` makes batches of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.data.columns import Columns, contiguous, sum_rows
from engine.data.data_report import DatasetReport
from engine.data.extras import Extra, ExtraColumns, Span, extra_of
from engine.data.packing import Packs


class TokenDataset:
    """Documents and rows.

    Args:
        columns: the documents, none of which is empty or longer than `seq_length`.
        rows: which documents are in which row; None packs them, or puts one group of documents in each.
        seq_length: tokens of a row.
        packing: whether rows hold several groups of documents.
        companions: data sets with the same rows, by the part of a micro-batch that holds theirs ("module:NAME").
        report: counts of the records so far; completed here.

    A row's weight in the loss (`target_counts`) is its target tokens, or, where extras count documents, its groups.
    """

    def __init__(
        self,
        columns: Columns,
        rows: Packs | None = None,
        *,
        seq_length: int,
        packing: bool = False,
        companions: Mapping[str, TokenDataset] | None = None,
        report: DatasetReport | None = None,
    ) -> None:
        lengths, group = columns.lengths, columns.group
        assert not len(lengths) or 1 <= lengths.min() <= lengths.max() <= seq_length, (lengths, seq_length)
        self.columns = columns
        self.tokens: NDArray[np.integer] = columns.tokens
        self.targets: NDArray[np.bool_] | None = columns.targets
        self.starts: NDArray[np.int64] = columns.starts
        self.lengths: NDArray[np.int64] = lengths
        self.max_token, self.group = columns.max_token, group
        self.seq_length, self.packing = seq_length, packing
        self.companions = dict(companions or {})
        self.family: Any = None
        """The family of a vision-language model, which reads the images; see `read_with`."""
        self.decoded: dict[Any, Any] | None = None
        """Images that are kept once they are decoded; None keeps none."""
        self.rows = columns.rows(seq_length, packing=packing) if rows is None else rows
        in_row_order = columns.target_counts[self.rows.documents]
        self.target_counts: NDArray[np.int64] = (
            np.diff(self.rows.offsets) // group
            if any(extra.counts_documents for extra in columns.extras)
            else sum_rows(in_row_order, self.rows.offsets)
        )
        placed = lengths[self.rows.documents]
        if self.rows.reused is not None:
            placed = placed - self.rows.reused
        self.row_lengths: NDArray[np.int64] = sum_rows(placed, self.rows.offsets)
        assert not len(self.rows) or self.row_lengths.max() <= seq_length, (self.row_lengths.max(), seq_length)
        report, tokens = report or DatasetReport(), int(self.row_lengths.sum())
        self.report = replace(
            report,
            limit=seq_length // group,
            documents=report.documents or len(lengths) // group,
            rows=len(self.rows),
            tokens=tokens,
            reused_tokens=0 if self.rows.reused is None else int(self.rows.reused.sum()),
            target_tokens=int(in_row_order.sum()),
            packing_efficiency=tokens / max(len(self.rows) * seq_length, 1) if packing else None,
        )

    @property
    def extras(self) -> tuple[ExtraColumns, ...]:
        """What the documents have beside their tokens."""
        return self.columns.extras

    def extra(self, kind: type[Extra]) -> Extra | None:
        """Returns the extras of exactly this class; None where the documents have none."""
        return extra_of(self.extras, kind)

    def put(self, extra: ExtraColumns) -> None:
        """Adds extras, in place of those of the same class; the number of targets stays."""
        extras = {type(one): one for one in (*self.extras, extra)}
        self.columns = replace(self.columns, extras=tuple(extras.values()))

    @property
    def feature_counts(self) -> NDArray[np.int64]:
        """int64 [D], tokens of each document that features of images replace."""
        return np.zeros(len(self.lengths), dtype=np.int64) + sum(extra.feature_counts() for extra in self.extras)

    def feature_spans(self, document: int) -> list[Span]:
        """Returns the tokens of a document that features of images replace."""
        return [span for extra in self.extras for span in extra.feature_spans(document)]

    def read_with(self, family: Any, decoded: dict[Any, Any] | None = None) -> None:
        """Sets the family of a vision-language model, which reads images and places features; it is no data.

        Args:
            decoded: where images are kept, for few of them that are read often; None keeps none.
        """
        self.family, self.decoded = family, decoded
        for companion in self.companions.values():
            companion.read_with(family, decoded)

    def most_features(self) -> int:
        """Returns how many tokens features of images replace in the row where they are most."""
        if not self.extras or not len(self):
            return 0
        return int(sum_rows(self.feature_counts[self.rows.documents], self.rows.offsets).max())

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self.rows)

    def documents(self, row: int) -> Iterator[tuple[NDArray[np.integer], NDArray[np.bool_]]]:
        """Yields the tokens and targets of each document of a row; the targets' first is false."""
        for document in self.rows.row(row).tolist():
            start, length = int(self.starts[document]), int(self.lengths[document])
            span = slice(start, start + length)
            targets = np.ones(length, dtype=bool) if self.targets is None else self.targets[span]
            if targets[0]:
                targets = targets.copy()
                targets[0] = False
            yield self.tokens[span], targets

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        arrays = [self.starts, self.lengths, self.rows.documents, self.rows.offsets]
        if self.rows.reused is not None:
            arrays.append(self.rows.reused)
        identity = self.columns.identity
        if identity is not None:
            digest.update(identity.encode())
        else:
            assert self.targets is not None
            arrays += [self.tokens, self.targets]
        hashed = [extra for extra in self.extras if identity is None or extra.hashed_again]
        arrays += [array for extra in hashed for array in extra.identity()]
        for array in arrays:
            digest.update(f"{array.dtype.str}{len(array)};".encode())
            digest.update(np.ascontiguousarray(array).data)
        for companion in self.companions.values():
            digest.update(companion.fingerprint().encode())
        return digest.hexdigest()

    def fingerprint(self) -> str:
        """Returns a hash of everything that training reads: tokens, targets, documents, rows, extras, companions."""
        return self._digest


def dataset_of(
    documents: Sequence[tuple[Sequence[int], Sequence[bool]]],
    *,
    seq_length: int,
    packing: bool = False,
    extras: Sequence[ExtraColumns] = (),
) -> TokenDataset:
    """Returns a data set of given documents: (token ids, targets) each, and what they have beside these."""
    columns = contiguous(
        np.array([token for tokens, _ in documents for token in tokens], dtype=np.int32),
        np.array([flag for _, targets in documents for flag in targets], dtype=bool),
        np.cumsum([0, *(len(tokens) for tokens, _ in documents)], dtype=np.int64),
        extras=extras,
    )
    return TokenDataset(columns, seq_length=seq_length, packing=packing)
