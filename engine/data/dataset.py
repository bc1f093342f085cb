"""Tokenised documents in memory, and their arrangement in rows.

A `TokenDataset` is three flat arrays (tokens, targets, document offsets) and the list of rows. The row is the
sample that the data order counts: one document, or with packing one pack of documents. It knows nothing of batches,
ranks or order; `engine.data.loader` does.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.config.data import FORMATS, OVERLONG, Packing
from engine.data.concatenate import concatenate
from engine.data.data_report import DatasetReport, DroppedPlaces
from engine.data.document import Document
from engine.data.formats import Sample, read_samples
from engine.data.packing import Packs, one_each, pack
from engine.data.record_files import expand_paths
from engine.data.tokenize import cut_document, tokenize_samples
from engine.data.tokenizer import Tokenizer
from engine.errors import UserError
from engine.kernels.native import packing as native_packing
from engine.kernels.native.loader import native_status
from engine.rollouts.data.completions import Completion, CompletionColumns, RowWeight
from engine.sentences import listed
from engine.vision.data.columns import Extras, VisionColumns, vision_columns
from engine.vision.data.family import VisionFamily
from engine.vision.data.reader import ImageReader
from engine.vision.data.row_images import Decoded

CHUNK = 1024
"""Samples that are tokenised together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """Facts about documents that are known without reading their tokens.

    Args:
        lengths: int64 [D], tokens of each.
        targets: int64 [D], target tokens of each.
        max_token: the largest id, or -1.
        identity: changes with the content of the files; None where the arrays are in memory.
        rows: which documents are in which row, where that is already decided.
    """

    lengths: NDArray[np.int64]
    targets: NDArray[np.int64]
    max_token: int
    identity: str | None = None
    rows: Packs | None = None


def _in_memory(
    tokens: NDArray[np.integer],
    targets: NDArray[np.bool_] | None,
    offsets: NDArray[np.int64],
    vision: VisionColumns | None,
) -> Stored:
    """Describes contiguous documents in memory."""
    assert targets is not None and offsets[0] == 0, "documents in memory have targets"
    assert len(tokens) == len(targets) == offsets[-1], (len(tokens), len(targets))
    assert not targets[offsets[:-1]].any(), "the first token of a document has nothing to be predicted from"
    sums = np.zeros(len(tokens) + 1, dtype=np.int64)
    np.cumsum(targets, out=sums[1:])
    counts = sums[offsets[1:]] - sums[offsets[:-1]]
    return Stored(
        lengths=np.diff(offsets),
        targets=counts if vision is None else counts + vision.label_counts,
        max_token=int(tokens.max()) if len(tokens) else -1,
    )


class TokenDataset:
    """Documents and rows.

    Args:
        tokens: integer [T], the documents end to end.
        targets: bool [T], whether a token is a target; None where all are. A document's first token never is: there
            is nothing to predict it from.
        offsets: int64 [D + 1], where documents begin; or [D] with `lengths`. None is empty or longer than `seq_length`.
        seq_length: tokens of a row.
        packing: whether rows hold several documents.
        group: documents that belong together, side by side in one row: 2 for pairs of answers, else 1.
        signs: float32 [D], 1 for liked and -1 for disliked answers; None where documents are not answers that are
            compared. A group of 2 has one of each.
        sizes: int64 [groups], the length of each for packing; None for its tokens.
        mismatched: the same questions, each with another question's answer, in the same rows; None where the objective
            needs none.
        completions: what is known of the documents, where they are completions to train on; None otherwise.
        report: counts of the records so far; completed here.
        vision: images and odd labels of the documents, of a vision-language model; None where there are none.
        stored: how much of a token store each document is, where the arrays are mapped from files and must not be read
            as a whole.

    A row's weight in the loss (`target_counts`) is its target tokens, or, where answers are compared, its groups; that
    of completions is what their `row_weight` says.
    """

    def __init__(
        self,
        tokens: NDArray[np.integer],
        targets: NDArray[np.bool_] | None,
        offsets: NDArray[np.int64],
        *,
        seq_length: int,
        packing: bool,
        group: int = 1,
        signs: NDArray[np.float32] | None = None,
        sizes: NDArray[np.int64] | None = None,
        mismatched: TokenDataset | None = None,
        completions: CompletionColumns | None = None,
        vision: VisionColumns | None = None,
        report: DatasetReport | None = None,
        stored: Stored | None = None,
    ) -> None:
        stored = stored or _in_memory(tokens, targets, offsets, vision)
        lengths = stored.lengths
        assert len(lengths) % group == 0 and (group == 1 or signs is not None), (len(lengths), group)
        assert not len(lengths) or 1 <= lengths.min() <= lengths.max() <= seq_length, (lengths, seq_length)
        self.max_token = stored.max_token
        self.tokens: NDArray[np.integer] = tokens
        if stored.identity is None:
            self.tokens = tokens.astype(np.uint16 if self.max_token < 1 << 16 else np.int32, copy=False)
        self.targets = targets
        self.starts: NDArray[np.int64] = offsets[: len(lengths)]
        self.lengths = lengths
        self._identity = stored.identity
        self.seq_length = seq_length
        self.packing = packing
        self.group = group
        self.compares = signs is not None
        """Whether documents are answers that are compared."""
        self.mismatched = mismatched
        assert completions is None or (len(completions.advantages), len(completions.sampled_logps)) == (
            len(lengths),
            len(tokens),
        ), (len(completions.advantages), len(lengths), len(completions.sampled_logps), len(tokens))
        self.completions = completions
        """What is known of the documents, of completions to train on; replaced where log-probabilities are added."""
        self.vision = vision
        """What the documents have beside their tokens."""
        self.family: VisionFamily | None = None
        """What reads the images, of a vision-language model; see `read_with`."""
        self.decoded: Decoded | None = None
        """Images that are kept once they are decoded; None keeps none."""
        self.signs = np.ones(len(lengths), dtype=np.float32) if signs is None else signs
        self.reference_logps: NDArray[np.float32] | None = None
        """float32 [D], log-likelihood of each answer under the reference, where it was computed before training."""
        together = lengths.reshape(-1, group).sum(axis=1)
        packs = stored.rows
        if packs is None:
            packs = _pack(together if sizes is None else sizes, seq_length) if packing else one_each(len(together))
        self.rows: Packs = packs.of_groups(group)
        self.document_targets: NDArray[np.int64] = stored.targets
        in_row_order = stored.targets[self.rows.documents]
        counts_documents = completions is not None and completions.row_weight == "completions"
        self.target_counts: NDArray[np.int64] = (
            np.diff(packs.offsets) if self.compares or counts_documents else _sum_rows(in_row_order, self.rows.offsets)
        )
        self.row_lengths: NDArray[np.int64] = _sum_rows(lengths[self.rows.documents], self.rows.offsets)
        report = report or DatasetReport()
        self.report = replace(
            report,
            limit=seq_length // group,
            documents=report.documents or len(together),
            rows=len(self.rows),
            tokens=int(self.row_lengths.sum()),
            target_tokens=int(in_row_order.sum()),
            packing_efficiency=int(self.row_lengths.sum()) / max(len(packs) * seq_length, 1) if packing else None,
        )

    @property
    def num_without_images(self) -> int:
        """Documents of tokens alone."""
        if self.vision is None:
            return len(self.lengths)
        return int((np.diff(self.vision.image_offsets) == 0).sum())

    def read_with(self, family: VisionFamily | None, decoded: Decoded | None = None) -> None:
        """Sets the family of a vision-language model, which reads images and places features; it is no data.

        Args:
            decoded: where images are kept, for few of them that are read often; None keeps none.
        """
        self.family, self.decoded = family, decoded
        if self.mismatched is not None:
            self.mismatched.read_with(family, decoded)

    def most_features(self) -> int:
        """Returns how many tokens features of images replace in the row where they are most."""
        if self.vision is None or not len(self):
            return 0
        return int(_sum_rows(self.vision.feature_counts[self.rows.documents], self.rows.offsets).max())

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
        if self._identity is not None:
            digest.update(self._identity.encode())
        else:
            assert self.targets is not None
            arrays += [self.tokens, self.targets]
        if self.compares:
            arrays.append(self.signs)
        if self.completions is not None:
            arrays += [self.completions.advantages, self.completions.sampled_logps]
        if self.vision is not None and self._identity is None:
            arrays += self.vision.identity()
        for array in arrays:
            digest.update(f"{array.dtype.str}{len(array)};".encode())
            digest.update(np.ascontiguousarray(array).data)
        if self.mismatched is not None:
            digest.update(self.mismatched.fingerprint().encode())
        return digest.hexdigest()

    def fingerprint(self) -> str:
        """Returns a hash of everything that training reads: tokens, targets, documents, rows, preferences, and what is
        known of completions since they were sampled."""
        return self._digest

    @classmethod
    def from_documents(
        cls,
        documents: Sequence[tuple[Sequence[int], Sequence[bool]]],
        *,
        seq_length: int,
        packing: bool = False,
        vision: VisionColumns | None = None,
    ) -> TokenDataset:
        """Returns a dataset of given documents: (token ids, targets) each, and what they have beside these."""
        lengths = [len(tokens) for tokens, _ in documents]
        return cls(
            np.array([token for tokens, _ in documents for token in tokens], dtype=np.int32),
            np.array([flag for _, targets in documents for flag in targets], dtype=bool),
            np.cumsum([0, *lengths], dtype=np.int64),
            seq_length=seq_length,
            packing=packing,
            vision=vision,
        )

    @classmethod
    def from_completions(
        cls, completions: Sequence[Completion], *, seq_length: int, packing: bool = False, row_weight: RowWeight
    ) -> TokenDataset:
        """Returns a dataset of completions, none of which is longer with its prompt than `seq_length`.

        Args:
            completions: in the order of the documents.
            seq_length, packing: as for all data sets.
            row_weight: what a row weighs in the loss, which the objective says.
        """
        assert all(one.prompt and len(one.tokens) == len(one.sampled_logps) > 0 for one in completions)
        documents = [
            ([*one.prompt, *one.tokens], [False] * len(one.prompt) + [one.trained] * len(one.tokens))
            for one in completions
        ]
        logps = [logp for one in completions for logp in (*[0.0] * len(one.prompt), *one.sampled_logps)]
        return cls(
            np.array([token for tokens, _ in documents for token in tokens], dtype=np.int32),
            np.array([flag for _, targets in documents for flag in targets], dtype=bool),
            np.cumsum([0, *(len(tokens) for tokens, _ in documents)], dtype=np.int64),
            seq_length=seq_length,
            packing=packing,
            completions=CompletionColumns(
                advantages=np.array([one.advantage for one in completions], dtype=np.float32),
                sampled_logps=np.array(logps, dtype=np.float32),
                row_weight=row_weight,
            ),
        )

    @classmethod
    def build(
        cls,
        paths: str | Path | list[str] | tuple[str, ...],
        *,
        tokenizer: Tokenizer,
        data_format: str = "auto",
        seq_length: int,
        packing: Packing = False,
        overlong: str = "truncate",
        mask_prompt: bool = True,
        progress: Callable[[int, int], None] | None = None,
        images: ImageReader | None = None,
    ) -> TokenDataset:
        """Reads and tokenises files.

        Args:
            paths: one file, several, or patterns with *; read in the order given.
            tokenizer: encodes the text.
            data_format: one of `engine.config.data.FORMATS`.
            seq_length: tokens of a row.
            packing: put several documents into a row, or "concatenate" all and cut rows, which are documents then.
            overlong: what to do with a document longer than a row: "truncate" keeps its beginning (all of it where
                documents are concatenated), "cut" makes several of it, "drop" skips it, "error" stops. A .txt
                stream is cut into rows and never overlong.
            mask_prompt: train only on completions and assistant turns.
            progress: called with (records done, records in all) now and then.
            images: as for `engine.data.tokenize.tokenize_samples`.

        Raises:
            UserError: a file or record that cannot be used, or nothing left to train on.
        """
        assert data_format in FORMATS and overlong in OVERLONG, (data_format, overlong)
        if seq_length < 2:
            raise UserError(f"data.seq_length is {seq_length}, expected at least 2: a token and the one it predicts.")
        started = time.monotonic()
        stream_length = seq_length
        if packing == "concatenate":
            stream_length = sys.maxsize  # in one piece: cuts would share a token with the next
        collected = _Collector(seq_length, overlong, concatenated=packing == "concatenate")
        files = expand_paths(paths)
        sources = [read_samples(path, data_format) for path in files]
        total = sum(count for count, _ in sources)
        for _, samples in sources:
            for chunk in _chunks(samples):
                for document in tokenize_samples(
                    chunk, tokenizer, mask_prompt=mask_prompt, stream_length=stream_length, images=images
                ):
                    collected.add(document)
                collected.records += len(chunk)
                if progress is not None:
                    progress(collected.records, total)
        arrays, report = collected.arrays(listed(files)), collected.report()
        vision = collected.vision()
        if packing == "concatenate":
            *arrays, left_over = concatenate(*arrays, seq_length)
            report = replace(report, left_over=left_over)
        dataset = cls(*arrays, seq_length=seq_length, packing=bool(packing), vision=vision, report=report)
        dataset.report = replace(dataset.report, seconds=time.monotonic() - started)
        dataset.read_with(None if images is None else images.family)
        return dataset


class _Collector:
    """Collects documents, and counts those that are cut, truncated or dropped."""

    def __init__(self, seq_length: int, overlong: str, *, concatenated: bool) -> None:
        self.seq_length = seq_length
        self.overlong = overlong
        self.concatenated = concatenated
        self.records = 0
        self.tokens: list[NDArray[np.int32]] = []
        self.targets: list[NDArray[np.bool_]] = []
        self.extras: list[Extras | None] = []
        self.in_image = DroppedPlaces()
        self.documents = self.cut = self.longest = self.truncated = self.lost_tokens = 0
        self.dropped_overlong = self.dropped_prompt_only = self.dropped_without_target = 0

    def add(self, document: Document) -> None:
        self.longest = max(self.longest, len(document.tokens))
        if not document.targets.any():
            self.dropped_without_target += 1
        elif self.concatenated and document.extras is not None:
            raise document.place.error(
                "the conversation is for a vision-language model, but data.packing concatenate cuts documents "
                "anywhere, images too; set data.packing to true."
            )
        elif len(document.tokens) <= self.seq_length or self._continues(document):
            self._keep(document)
        elif self.overlong == "error":
            raise document.place.error(
                f"the record has {len(document.tokens)} tokens, more than data.seq_length {self.seq_length}; raise it, "
                "or set data.overlong to truncate, cut or drop."
            )
        elif self.overlong == "drop":
            self.dropped_overlong += 1
        elif self.overlong == "cut" and document.extras is not None:
            raise document.place.error(
                f"the record has {len(document.tokens)} tokens, more than data.seq_length {self.seq_length}, and a "
                "conversation for a vision-language model cannot be cut into several; set data.overlong to truncate "
                "or drop."
            )
        elif self.overlong == "cut":
            pieces = [piece for piece in cut_document(document, self.seq_length) if piece.targets.any()]
            self.cut += 1
            self._keep(*pieces)
        elif (beginning := document.beginning(self.seq_length)) is None:
            self.in_image.add(document.place)
        elif not beginning.targets.any():
            self.dropped_prompt_only += 1
        else:
            self.truncated += 1
            self.lost_tokens += len(document.tokens) - self.seq_length
            self._keep(beginning)

    def _keep(self, *pieces: Document) -> None:
        """Adds the pieces of one document."""
        self.documents += 1
        self.tokens += [piece.tokens for piece in pieces]
        self.targets += [piece.targets for piece in pieces]
        self.extras += [piece.extras for piece in pieces]

    def _continues(self, document: Document) -> bool:
        """Returns whether a document continues in the next row."""
        return self.concatenated and (
            self.overlong in ("truncate", "cut") or document.place.path.suffix.lower() == ".txt"
        )

    def arrays(self, names: str) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int64]]:
        if not self.records:
            raise UserError(f"{names} has no records; give a file that has some.")
        if not self.tokens:
            raise UserError(self.report().nothing_left(names, "nothing to train on"))
        lengths = [len(tokens) for tokens in self.tokens]
        return (np.concatenate(self.tokens), np.concatenate(self.targets), np.cumsum([0, *lengths], dtype=np.int64))

    def vision(self) -> VisionColumns | None:
        return vision_columns(self.extras)

    def report(self) -> DatasetReport:
        report = DatasetReport(
            limit=self.seq_length,
            records=self.records,
            documents=self.documents,
            pieces=len(self.tokens) if self.cut else 0,
            longest=self.longest,
            truncated=self.truncated,
            lost_tokens=self.lost_tokens,
            dropped_overlong=self.dropped_overlong,
            dropped_prompt_only=self.dropped_prompt_only,
            dropped_without_target=self.dropped_without_target,
        )
        return self.in_image.told(report)


def _chunks(samples: Iterator[Sample]) -> Iterator[list[Sample]]:
    while chunk := list(islice(samples, CHUNK)):
        yield chunk


def _pack(lengths: NDArray[np.int64], capacity: int) -> Packs:
    """Returns `engine.data.packing.pack`, by the compiled code where it is built: the same rows in less time."""
    if not native_status().available:
        return pack(lengths, capacity)
    offsets, documents = native_packing.pack(lengths, capacity)
    return Packs(offsets=offsets, documents=documents)


def _sum_rows(values: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    sums = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=sums[1:])
    return sums[offsets[1:]] - sums[offsets[:-1]]
