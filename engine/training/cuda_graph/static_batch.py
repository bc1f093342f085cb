"""The contract of a graph's inputs: those that may change from replay to replay, and where they must lie.

A graph repeats launches with the arguments of its capture. So each input
- has a fixed address: a micro-batch's tensors are copied into those of a `StaticBatch` before each replay;
- has a fixed shape: rows x length tokens, and `documents` + 1 offsets, the last one repeated where there are fewer
  documents, which makes documents of no tokens;
- is on the device: document lengths on the host are empty, and the longest document is taken to be as long as a row.
The other changing inputs are 0-dim tensors: target count and learning rate (`TrainStep.prepare`), the step count
that dropout draws from, the optimizer's counters, its clip factor and its flag for gradients that are not finite.
A micro-batch of another shape, or of more documents, or in which documents continue others, does not fit and is
computed without a graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import IGNORE_LABEL, Batch
from engine.data.dataset import TokenDataset
from engine.errors import UserError

DOCUMENTS_PER_ROW = 32
"""Default number of documents that a graph has room for, per row. An unused one costs the flash kernel a block of
threads for each head and each block of a row's queries, which ends at once."""

_COPIED = ("tokens_BS", "labels_BS", "positions_BS", "token_index_BS", "loss_weights_BS")


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticShape:
    """The shape of every micro-batch that a graph replays.

    Args:
        rows, length: of tokens.
        documents: most documents in all rows together.
    """

    rows: int
    length: int
    documents: int

    def __post_init__(self) -> None:
        assert self.documents >= self.rows, "every row starts a document"

    def fits(self, batch: Batch) -> bool:
        """Returns whether the batch can be copied into a `StaticBatch` of this shape."""
        return (
            (batch.num_rows, batch.row_length) == (self.rows, self.length)
            and len(batch.document_lengths) <= self.documents
            and not batch.document_parents
            and batch.context_plan is None
            and all(part.graphs_ignore for part in batch.parts)
        )


class StaticBatch:
    """The static tensors of one micro-batch.

    Args:
        shape: of the micro-batch.
        device: of the tensors.
    """

    def __init__(self, shape: StaticShape, device: torch.device) -> None:
        self._shape = shape
        size = (shape.rows, shape.length)
        columns = torch.arange(shape.length, device=device)
        slots = torch.arange(shape.rows, device=device)
        self.batch = Batch(
            tokens_BS=torch.zeros(size, dtype=torch.int64, device=device),
            labels_BS=torch.full(size, IGNORE_LABEL, dtype=torch.int64, device=device),
            positions_BS=columns.repeat(shape.rows, 1),
            token_index_BS=slots[:, None] * shape.length + columns,
            loss_weights_BS=torch.zeros(size, dtype=torch.float32, device=device),
            document_offsets=torch.arange(shape.documents + 1, dtype=torch.int32, device=device)
            .mul_(shape.length)
            .clamp_(max=shape.rows * shape.length),
            document_lengths=(),
        )
        """The inputs of a graph; before the first `load` a batch without targets, of one document per row."""

    def load(self, batch: Batch) -> None:
        """Copies a batch that fits; it may lie on the host, and is not waited for where that memory is pinned."""
        assert self._shape.fits(batch), (self._shape, batch.num_rows, batch.row_length, len(batch.document_lengths))
        for name in _COPIED:
            getattr(self.batch, name).copy_(getattr(batch, name), non_blocking=True)
        offsets, count = self.batch.document_offsets, batch.document_offsets.shape[0]
        offsets[:count].copy_(batch.document_offsets, non_blocking=True)
        offsets[count:].fill_(batch.num_tokens)


def max_documents_per_row(dataset: TokenDataset) -> int:
    """Returns the number of documents in the row that has most of them."""
    return int(np.diff(dataset.rows.offsets).max())


def document_capacity(asked: int | None, *, rows: int, max_documents_per_row: int, uniform: bool) -> int:
    """Returns the number of documents that a graph's micro-batch has room for.

    Args:
        asked: memory.graph_documents.
        rows: of a micro-batch.
        max_documents_per_row: documents in any row of the training data.
        uniform: whether several ranks replay one collective together, so that all of them must fit, or none.

    Raises:
        UserError: less is asked for than the data needs, where every micro-batch must fit.
    """
    most = rows * max_documents_per_row
    if asked is None:
        return most if uniform else min(most, rows * DOCUMENTS_PER_ROW)
    if uniform and asked < most:
        raise UserError(
            f"memory.graph_documents is {asked}, but a micro-batch of {rows} rows may have {most} documents, and with "
            "memory.cuda_graph step all data-parallel ranks must replay their graphs together: set "
            f"memory.graph_documents to {most} or null, or memory.cuda_graph to layer."
        )
    if asked < rows:
        raise UserError(
            f"memory.graph_documents is {asked}, but a micro-batch of train.micro_batch_size {rows} rows has at least "
            f"{rows} documents: set memory.graph_documents to more, or to null."
        )
    return asked
