"""The one record that flows from the data loader through the model to the loss.

Rows are slots of the global batch, columns are positions in a row. Layers see the rows flattened to T = B * S tokens,
row after row. Nothing here knows about ranks: a rank's batch is a selection of slots.

Legend: B rows (micro-batch), S columns (row length), T = B * S, D documents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from engine.zigzag import ContextPlan

IGNORE_LABEL = -100
"""Label of a position that carries no loss."""

Record = TypeVar("Record", "Answers", "Batch")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """The answers of a micro-batch whose likelihoods are compared, numbered in the order of the documents they are in.

    Args:
        ids_BS: int64 number of the answer whose document each token belongs to; arbitrary for padding, whose
            weight is 0.
        signs: float32 [N]: 1 for an answer that was preferred, -1 for one that was not. In pairs the two alternate.
        lengths: float32 [N], target tokens of each answer, over whole rows.
        documents: number of each in the data set, on the host.
        reference_logps: float32 [N], log-likelihoods under the reference; None where they were not computed before
            training.
    """

    ids_BS: Tensor
    signs: Tensor
    lengths: Tensor
    documents: tuple[int, ...]
    reference_logps: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One micro-batch, or the part of it that a context-parallel rank holds: some columns of every row.

    Args:
        tokens_BS: int64 token ids. Ignored where `embeddings_TH` is given.
        labels_BS: int64, already shifted: the token that position s must predict, or IGNORE_LABEL. The last position
            of a document never has a target.
        positions_BS: int64 position inside its document, from 0, for rotary embeddings.
        token_index_BS: int64 slot_in_global_batch * seq_length + column: the coordinate of dropout masks,
            so that packing, accumulation and the layout cannot change a mask. `seq_length` is the configured one, even
            where the row is shorter.
        loss_weights_BS: float32 weight of each target; exactly 0 where the label is IGNORE_LABEL.
        document_offsets: int32 [D + 1], cumulative lengths of the documents over the flattened T tokens, from 0 to T.
            Attention never crosses them. Every row starts a document; padding at a row's end belongs to its last one.
        document_lengths: the same on the host, which avoids waiting for the device. Both are those of the whole
            rows, also where this rank holds some columns only.
        context_plan: which tokens this rank holds and which attend to which, where rows are split over context-parallel
            ranks; None where they are whole.
        embeddings_TH: optional input embeddings that replace the embedding lookup.
        answers: the answers to compare, where the objective compares answers; None otherwise.
        mismatched: the questions of the same rows with other questions' answers, where the objective needs their
            likelihoods; None otherwise.
    """

    tokens_BS: Tensor
    labels_BS: Tensor
    positions_BS: Tensor
    token_index_BS: Tensor
    loss_weights_BS: Tensor
    document_offsets: Tensor
    document_lengths: tuple[int, ...]
    context_plan: ContextPlan | None = None
    embeddings_TH: Tensor | None = None
    answers: Answers | None = None
    mismatched: Batch | None = None

    @property
    def num_rows(self) -> int:
        return self.tokens_BS.shape[0]

    @property
    def row_length(self) -> int:
        return self.tokens_BS.shape[1]

    @property
    def num_tokens(self) -> int:
        return self.tokens_BS.numel()

    def to(self, device: torch.device) -> Batch:
        """Returns the same batch on `device`; copies are asynchronous where the source is pinned."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Returns the same batch with `change` applied to each of its tensors."""
        moved = _changed(self, change)
        return replace(
            moved,
            answers=None if self.answers is None else _changed(self.answers, change),
            mismatched=None if self.mismatched is None else self.mismatched.map(change),
        )


def _changed(record: Record, change: Callable[[Tensor], Tensor]) -> Record:
    changed = {
        field.name: change(value)
        for field in fields(record)
        if isinstance(value := getattr(record, field.name), Tensor)
    }
    return replace(record, **changed)
