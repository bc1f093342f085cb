"""Collates rows of a dataset into the batch record: shifted labels, positions, document boundaries, padding.

Pure: which rows go into which batch is decided in `engine.data.loader`.

Legend: B rows (micro-batch), S columns (row length), D kinds of positions: one, or time, height and width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import IGNORE_LABEL, Batch, Padding, SharedTokens
from engine.data.dataset import TokenDataset
from engine.data.parts import CollatedRows, PlacedDocument, collectors
from engine.data.prefixes import Trees
from engine.data.row_shape import WHOLE, RowShape
from engine.seams import resolve
from engine.zigzag import ContextLayout, make_plan, rank_columns

Text = tuple[NDArray[np.integer], NDArray[np.bool_]]
"""Tokens and targets of a document."""


def row_length(dataset: TokenDataset, rows: Sequence[int | None], shape: RowShape) -> int:
    """Returns the row length of a batch of these rows: the longest, padded; with packing the dataset's row length."""
    if dataset.packing:
        return dataset.seq_length
    longest = max((int(dataset.row_lengths[row]) for row in rows if row is not None), default=1)
    minimum = 2 * shape.context_size if shape.context_size > 1 else 1  # each rank holds two chunks of a row
    return shape.padded(max(longest, minimum), dataset.seq_length)


def build_batch(
    dataset: TokenDataset,
    rows: Sequence[int | None],
    slots: Sequence[int],
    *,
    length: int,
    shape: RowShape = WHOLE,
) -> Batch:
    """Returns one micro-batch.

    Args:
        dataset: where the rows are.
        rows: B row numbers; None is a filler, a row of padding that carries no loss.
        slots: B slots of the global batch.
        length: S, at least the longest row.
        shape: its `pad_token` fills a row's end, belongs to the row's last document, has no label, and its positions
            continue.

    Raises:
        UserError: an image that cannot be read.
    """
    collecting = collectors(dataset, shape.input_rank)
    size = (len(rows), length)
    tokens_BS = np.full(size, shape.pad_token, dtype=np.int64)
    labels_BS = np.full(size, IGNORE_LABEL, dtype=np.int64)
    kinds = max((one.position_kinds for one in collecting), default=1)
    padding_BS = np.zeros(size, dtype=np.bool_)
    positions_DBS = np.empty((kinds, *size), dtype=np.int64)
    columns = np.arange(length, dtype=np.int64)
    trees = Trees(size)
    for b, row in enumerate(rows):
        end = 0
        after = 0  # position of what follows the last document
        documents, reused, texts = _of_row(dataset, row)
        numbers = trees.add_row(b, dataset.lengths[documents].tolist(), reused)
        for document, skipped, number, (tokens, targets) in zip(documents, reused, numbers, texts, strict=True):
            tokens, targets = tokens[skipped:], targets[skipped:]
            start, end = end, end + len(tokens)
            tokens_BS[b, start:end] = tokens
            np.copyto(labels_BS[b, start : end - 1], tokens[1:], where=targets[1:])
            positions = columns[skipped : skipped + end - start]
            placed = PlacedDocument(
                document,
                number=number,
                row=b,
                start=start,
                first_token=b * length + start,
                dropout_index=int(slots[b]) * dataset.seq_length + start,
                tokens=tokens,
                labels=labels_BS[b, start:end],
                skipped=skipped,
            )
            for collector in collecting:
                found = collector.add(placed)
                positions = positions if found is None else found
            positions_DBS[:, b, start:end] = positions
            after = int(positions.max()) + 1
        positions_DBS[:, b, end:] = after + columns[: length - end]
        padding_BS[b, end:] = True
    collated = CollatedRows(labels_BS, positions_DBS)
    parts = [part for collector in collecting for part in collector.finish(collated)]
    weights_BS = (labels_BS != IGNORE_LABEL).astype(np.float32)
    if trees.parents:
        weights_BS *= trees.counts_BS
        parts.append(SharedTokens(counts_BS=torch.from_numpy(trees.counts_BS)))
    if padding_BS.any():
        parts.append(Padding(padding_BS=torch.from_numpy(padding_BS)))
    token_index_BS = np.asarray(slots, dtype=np.int64)[:, None] * dataset.seq_length + columns
    return Batch(
        tokens_BS=torch.from_numpy(tokens_BS),
        labels_BS=torch.from_numpy(labels_BS),
        positions_BS=torch.from_numpy(positions_DBS[0]),
        token_index_BS=torch.from_numpy(token_index_BS),
        loss_weights_BS=torch.from_numpy(weights_BS),
        document_offsets=torch.from_numpy(np.cumsum([0, *trees.lengths], dtype=np.int32)),
        document_lengths=tuple(trees.lengths),
        document_parents=tuple(trees.parents),
        parts=tuple(parts),
    )


def _of_row(dataset: TokenDataset, row: int | None) -> tuple[list[int], list[int], Iterable[Text]]:
    """Returns the documents of a row, how many of its first tokens each reuses, and their tokens and targets; none of a
    filler."""
    if row is None:
        return [], [], ()
    return dataset.rows.row(row).tolist(), dataset.rows.reused_in(row).tolist(), dataset.documents(row)


def context_part(batch: Batch, *, size: int, rank: int) -> Batch:
    """Returns the columns of every row that `rank` of `size` context-parallel ranks holds. See engine.zigzag."""
    if size == 1:
        return batch
    layout = ContextLayout.even(
        size=size,
        num_rows=batch.num_rows,
        row_length=batch.row_length,
        document_lengths=batch.document_lengths,
        document_parents=batch.document_parents,
    )
    columns = torch.cat([torch.arange(*span) for span in rank_columns(batch.row_length, size, rank)])
    held = {
        name: getattr(batch, name)[:, columns]
        for name in ("tokens_BS", "labels_BS", "positions_BS", "token_index_BS", "loss_weights_BS")
    }
    parts = tuple(part.columns(columns, batch.row_length) for part in batch.parts)
    return replace(batch, context_plan=make_plan(layout, rank), parts=parts, **held)


def rank_batch(dataset: TokenDataset, rows: Sequence[int | None], slots: Sequence[int], shape: RowShape) -> Batch:
    """Returns a rank's part of a micro-batch, with those of the data set's companions.

    Args:
        dataset, rows, slots: as for `build_batch`.
        shape: this rank's place, and how rows are padded.
    """
    batch = build_batch(dataset, rows, slots, length=row_length(dataset, rows, shape), shape=shape)
    batch = context_part(batch, size=shape.context_size, rank=shape.context_rank)
    others = {name: rank_batch(companion, rows, slots, shape) for name, companion in dataset.companions.items()}
    return batch.with_parts(*(resolve(name)(batch=other) for name, other in others.items())) if others else batch


def pin(batch: Batch) -> Batch:
    """Returns the same batch in page-locked memory, so that copies to a CUDA device do not block."""
    return batch.map(Tensor.pin_memory)
