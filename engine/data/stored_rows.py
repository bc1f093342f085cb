"""Data sets on token stores: which part of which document is in which row, decided from lengths alone."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.config.data import Packing
from engine.data.columns import Columns, contiguous, sum_rows
from engine.data.concatenate import concatenate
from engine.data.data_report import DatasetReport
from engine.data.dataset import TokenDataset
from engine.data.overlong import Fate, LongRecords, Measures, RecordKind
from engine.data.store import TokenStore, open_store
from engine.data.tokenizer import Tokenizer
from engine.errors import UserError

STORED = RecordKind(
    unit="document",
    subject="has a document of",
    ways=("truncate", "cut", "drop"),
    fates=(Fate.OVERLONG, Fate.PROMPT_ONLY, Fate.WITHOUT_TARGET),
)
_CHUNK = 1 << 24
"""Tokens whose targets are counted at a time, so that a large store is never in memory as a whole."""


def stored_dataset(
    path: str | Path,
    *,
    tokenizer: Tokenizer | None,
    seq_length: int,
    packing: Packing = False,
    overlong: str = "truncate",
) -> TokenDataset:
    """Returns the rows on a token store, which stays on disk.

    Args:
        path: see engine.data.store.
        tokenizer: of the run; None does not compare it with the store's.
        seq_length: tokens of a row.
        packing: put several documents into a row, or "concatenate" all, which reads them into memory.
        overlong: what to do with a document longer than a row: "truncate" keeps its beginning, "cut" makes several of
            it, of which neighbours share one token (the last of one is a target there and opens the next), "drop"
            skips it, "error" stops.

    Raises:
        UserError: the store cannot be used, or nothing is left to train on.
    """
    started = time.monotonic()
    store = open_store(path)
    if tokenizer is not None:
        store.require_tokenizer(tokenizer)
    if packing == "concatenate":
        return _concatenated(store, seq_length)
    long = LongRecords(STORED, limit=seq_length, overlong=overlong)
    starts, lengths = store.offsets[:-1], np.diff(store.offsets)
    first, spans = np.arange(len(lengths) + 1), np.minimum(lengths, seq_length)
    if overlong == "cut":
        starts, spans, first = cut_spans(starts, lengths, seq_length)
    counts = _target_counts(store, starts, spans)
    fates = long.decide(Measures.of_lengths(lengths, sum_rows(counts, first) > 0))
    if overlong == "error" and (fates == Fate.OVERLONG).any():
        raise UserError(f"{path} {STORED.refuse(int(lengths.max()), seq_length)}")
    kept = np.repeat(fates == Fate.KEPT, np.diff(first)) & (counts > 0)
    long.count_pieces(int(kept.sum()))
    report = long.report(records=0)
    if not kept.any():
        raise UserError(report.nothing_left(str(path), "nothing to train on"))
    columns = Columns(
        tokens=store.tokens,
        targets=store.targets,
        starts=starts[kept],
        lengths=spans[kept],
        target_counts=counts[kept],
        max_token=store.max_token,
        identity=store.identity,
    )
    dataset = TokenDataset(columns, seq_length=seq_length, packing=bool(packing), report=report)
    dataset.report = replace(dataset.report, seconds=time.monotonic() - started)
    return dataset


def _concatenated(store: TokenStore, seq_length: int) -> TokenDataset:
    """Returns the concatenated documents in rows; reads them into memory."""
    targets = None if store.targets is None else store.targets.whole()
    if targets is None:
        targets = np.ones(len(store.tokens), dtype=bool)
        targets[store.offsets[:-1]] = False
    columns, left_over = concatenate(contiguous(store.tokens.whole(), targets, store.offsets), seq_length)
    report = DatasetReport(documents=len(store.offsets) - 1, left_over=left_over)
    return TokenDataset(columns, seq_length=seq_length, packing=True, report=report)


def cut_spans(
    starts: NDArray[np.int64], lengths: NDArray[np.int64], seq_length: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Returns starts and lengths of the pieces of documents, each of at most `seq_length` tokens, neighbours sharing
    one; and the first piece of each document, int64 [D + 1].
    """
    step = seq_length - 1
    pieces = np.maximum(-(-(lengths - 1) // step), 1)
    owner = np.repeat(np.arange(len(lengths)), pieces)
    first = np.concatenate([[0], np.cumsum(pieces)[:-1]])
    skipped = (np.arange(len(owner)) - first[owner]) * step
    offsets = np.concatenate([first, [len(owner)]])
    return starts[owner] + skipped, np.minimum(lengths[owner] - skipped, seq_length), offsets


def _target_counts(store: TokenStore, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns int64 [documents] target tokens of each span; its first token never is one."""
    if store.targets is None or not len(starts):
        return lengths - 1
    counts = np.empty(len(starts), dtype=np.int64)
    first = 0
    while first < len(starts):
        end = max(first + 1, int(np.searchsorted(starts, starts[first] + _CHUNK)))
        low, high = int(starts[first]), int((starts[first:end] + lengths[first:end]).max())
        sums = np.zeros(high - low + 1, dtype=np.int64)
        np.cumsum(store.targets[low:high].view(np.uint8), out=sums[1:])
        at, until = starts[first:end] - low, starts[first:end] + lengths[first:end] - low
        counts[first:end] = sums[until] - sums[at + 1]
        first = end
    return counts
