"""Collates rows of a dataset into the batch record: shifted labels, positions, document boundaries, padding.

Pure: which rows go into which batch is decided in `engine.data.loader`.

Legend: B rows (micro-batch), S columns (row length), D kinds of positions: one, or time, height and width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import IGNORE_LABEL, Batch, Padding
from engine.data.dataset import TokenDataset
from engine.preferences.batch_parts import Answers, Mismatched
from engine.rollouts.batch_parts import Completions
from engine.vision.batch_parts import GridPositions
from engine.vision.data.row_images import RowImages
from engine.vision.tile_shares import ENCODES_ALL, EncoderRank
from engine.zigzag import ContextLayout, make_plan, rank_columns

GPU_LENGTH_MULTIPLE = 128
"""Row lengths on a GPU are multiples of it. torch attends to rows of one document by cuDNN, which builds a plan for
each new length, forward and backward: rows as long as their samples would have it build them for most of a run."""


def round_up(value: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def padded_length(longest: int, *, limit: int, pad_multiple: int, length_multiple: int) -> int:
    """Returns the length of a row whose tokens, or those of its longest neighbour, are `longest`.

    Args:
        limit: the configured row length, a multiple of `pad_multiple`.
        pad_multiple: what lengths must be a multiple of.
        length_multiple: what they should be a multiple of as well, where they stay within `limit`; padding adds nothing
            to a loss.
    """
    least = round_up(longest, pad_multiple)
    return max(least, min(round_up(least, math.lcm(pad_multiple, length_multiple)), limit))


def row_length(
    dataset: TokenDataset,
    rows: Sequence[int | None],
    *,
    pad_multiple: int,
    length_multiple: int,
    minimum: int,
) -> int:
    """Returns the row length of a batch of these rows: the longest, padded; with packing the dataset's row length."""
    if dataset.packing:
        return dataset.seq_length
    longest = max((int(dataset.row_lengths[row]) for row in rows if row is not None), default=1)
    return padded_length(
        max(longest, minimum),
        limit=dataset.seq_length,
        pad_multiple=pad_multiple,
        length_multiple=length_multiple,
    )


def build_batch(
    dataset: TokenDataset,
    rows: Sequence[int | None],
    slots: Sequence[int],
    *,
    length: int,
    pad_token: int,
    encoder: EncoderRank = ENCODES_ALL,
) -> Batch:
    """Returns one micro-batch.

    Args:
        dataset: where the rows are.
        rows: B row numbers; None is a filler, a row of padding that carries no loss.
        slots: B slots of the global batch.
        length: S, at least the longest row.
        pad_token: id that fills a row's end; it belongs to the row's last document, has no label, and its positions
            continue.
        encoder: which images this rank encodes, and so decodes.

    Raises:
        UserError: an image that cannot be read.
    """
    assert dataset.family is not None or dataset.vision is None, "images need a family that reads them"
    images = None if dataset.family is None else RowImages(dataset.family, dataset.vision, dataset.decoded)
    shape = (len(rows), length)
    tokens_BS = np.full(shape, pad_token, dtype=np.int64)
    labels_BS = np.full(shape, IGNORE_LABEL, dtype=np.int64)
    rotates_by_grid = dataset.family is not None and dataset.family.rotates_by_grid
    padding_BS = np.zeros(shape, dtype=np.bool_)
    positions_DBS = np.empty((3 if rotates_by_grid else 1, *shape), dtype=np.int64)
    columns = np.arange(length, dtype=np.int64)
    document_lengths: list[int] = []
    for b, row in enumerate(rows):
        start = end = 0
        after = 0  # position of what follows the last document
        documents = () if row is None else dataset.rows.row(row).tolist()
        for document, (tokens, targets) in zip(documents, () if row is None else dataset.documents(row), strict=True):
            if end > start:
                document_lengths.append(end - start)
            start, end = end, end + len(tokens)
            tokens_BS[b, start:end] = tokens
            np.copyto(labels_BS[b, start : end - 1], tokens[1:], where=targets[1:])
            positions = columns[: end - start]
            if images is not None:
                positions = images.add(
                    document,
                    number=len(document_lengths),
                    start=b * length + start,
                    length=end - start,
                    labels=labels_BS[b, start:end],
                    first_index=int(slots[b]) * dataset.seq_length + start,
                )
            positions_DBS[:, b, start:end] = positions
            after = int(positions.max()) + 1
        positions_DBS[:, b, end:] = after + columns[: length - end]
        document_lengths.append(length - start)
        padding_BS[b, end:] = True
    found = () if images is None else images.collected(labels_BS.size, encoder)
    if rotates_by_grid and found and found[0].grids:
        found = (*found, GridPositions(positions_3BS=torch.from_numpy(positions_DBS)))
    token_index_BS = np.asarray(slots, dtype=np.int64)[:, None] * dataset.seq_length + columns
    return Batch(
        tokens_BS=torch.from_numpy(tokens_BS),
        labels_BS=torch.from_numpy(labels_BS),
        positions_BS=torch.from_numpy(positions_DBS[0]),
        token_index_BS=torch.from_numpy(token_index_BS),
        loss_weights_BS=torch.from_numpy((labels_BS != IGNORE_LABEL).astype(np.float32)),
        document_offsets=torch.from_numpy(np.cumsum([0, *document_lengths], dtype=np.int32)),
        document_lengths=tuple(document_lengths),
    ).with_parts(
        _answers(dataset, rows, length, labels_BS) if dataset.compares else None,
        None if dataset.completions is None else _completions(dataset, rows, length, labels_BS),
        *found,
        Padding(padding_BS=torch.from_numpy(padding_BS)) if padding_BS.any() else None,
    )


class _Numbered(NamedTuple):
    """The documents of a micro-batch.

    Args:
        ids_BS: int64 number of each token's document; 0 for padding.
        documents: number of each in the data set.
        lengths: float32 [N], target tokens of each.
    """

    ids_BS: NDArray[np.int64]
    documents: list[int]
    lengths: NDArray[np.float32]


def _numbered(
    dataset: TokenDataset, rows: Sequence[int | None], length: int, labels_BS: NDArray[np.int64]
) -> _Numbered:
    """Returns which document each token belongs to."""
    ids_BS = np.zeros((len(rows), length), dtype=np.int64)
    documents: list[int] = []
    for b, row in enumerate(rows):
        start = 0
        for document in () if row is None else dataset.rows.row(row).tolist():
            end = start + int(dataset.lengths[document])
            ids_BS[b, start:end] = len(documents)
            documents.append(document)
            start = end
    lengths = np.bincount(ids_BS[labels_BS != IGNORE_LABEL], minlength=len(documents))
    return _Numbered(ids_BS, documents, lengths.astype(np.float32))


def _answers(dataset: TokenDataset, rows: Sequence[int | None], length: int, labels_BS: NDArray[np.int64]) -> Answers:
    """Returns which answer each token belongs to, where documents are answers."""
    found, known = _numbered(dataset, rows, length, labels_BS), dataset.reference_logps
    return Answers(
        ids_BS=torch.from_numpy(found.ids_BS),
        signs=torch.from_numpy(dataset.signs[found.documents]),
        lengths=torch.from_numpy(found.lengths),
        documents=tuple(found.documents),
        reference_logps=None if known is None else torch.from_numpy(known[found.documents]),
    )


def _completions(
    dataset: TokenDataset, rows: Sequence[int | None], length: int, labels_BS: NDArray[np.int64]
) -> Completions:
    """Returns what is known of the completions, that of a token in the column of its label."""
    found, columns = _numbered(dataset, rows, length, labels_BS), dataset.completions
    assert columns is not None, "documents that are no completions"
    logps_BS: dict[str, Tensor | None] = {}
    for name, known in columns.of_tokens().items():
        logps_BS[f"{name}_BS"] = None
        if known is None:
            continue
        values_BS = np.zeros((len(rows), length), dtype=np.float32)
        for b, row in enumerate(rows):
            start = 0
            for document in () if row is None else dataset.rows.row(row).tolist():
                first, end = int(dataset.starts[document]), start + int(dataset.lengths[document])
                values_BS[b, start : end - 1] = known[first + 1 : first + end - start]
                start = end
        logps_BS[f"{name}_BS"] = torch.from_numpy(np.where(labels_BS != IGNORE_LABEL, values_BS, np.float32(0)))
    sampled_BS = logps_BS.pop("sampled_logps_BS")
    assert sampled_BS is not None
    return Completions(
        ids_BS=torch.from_numpy(found.ids_BS),
        advantages=torch.from_numpy(columns.advantages[found.documents]),
        lengths=torch.from_numpy(found.lengths),
        documents=tuple(found.documents),
        sampled_logps_BS=sampled_BS,
        **logps_BS,
    )


def context_part(batch: Batch, *, size: int, rank: int) -> Batch:
    """Returns the columns of every row that `rank` of `size` context-parallel ranks holds. See engine.zigzag."""
    if size == 1:
        return batch
    layout = ContextLayout(
        size=size, num_rows=batch.num_rows, row_length=batch.row_length, document_lengths=batch.document_lengths
    )
    columns = torch.cat([torch.arange(*span) for span in rank_columns(batch.row_length, size, rank)])
    held = {
        name: getattr(batch, name)[:, columns]
        for name in ("tokens_BS", "labels_BS", "positions_BS", "token_index_BS", "loss_weights_BS")
    }
    parts = tuple(part.columns(columns, batch.row_length) for part in batch.parts)
    return replace(batch, context_plan=make_plan(layout, rank), parts=parts, **held)


def rank_batch(
    dataset: TokenDataset,
    rows: Sequence[int | None],
    slots: Sequence[int],
    *,
    pad_multiple: int,
    pad_token: int,
    context_size: int,
    context_rank: int,
    length_multiple: int = 1,
    encoder: EncoderRank = ENCODES_ALL,
) -> Batch:
    """Returns a rank's part of a micro-batch, with the mismatched answers of its rows where the data set has them.

    Args:
        dataset, rows, slots, pad_token, encoder: as for `build_batch`.
        pad_multiple, length_multiple: row lengths are multiples of both; see `padded_length`.
        context_size, context_rank: this rank's place among those that hold parts of each row.
    """
    minimum = 2 * context_size if context_size > 1 else 1  # each rank holds two chunks of a row
    length = row_length(dataset, rows, pad_multiple=pad_multiple, length_multiple=length_multiple, minimum=minimum)
    batch = build_batch(dataset, rows, slots, length=length, pad_token=pad_token, encoder=encoder)
    batch = context_part(batch, size=context_size, rank=context_rank)
    if dataset.mismatched is None:
        return batch
    mismatched = rank_batch(
        dataset.mismatched,
        rows,
        slots,
        pad_multiple=pad_multiple,
        pad_token=pad_token,
        context_size=context_size,
        context_rank=context_rank,
        length_multiple=length_multiple,
        encoder=encoder,
    )
    return batch.with_parts(Mismatched(batch=mismatched))


def pin(batch: Batch) -> Batch:
    """Returns the same batch in page-locked memory, so that copies to a CUDA device do not block."""
    return batch.map(Tensor.pin_memory)
