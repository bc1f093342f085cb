"""Micro-batches of a client's documents: each is one row, in which documents lie one after the other.

Legend: B rows, 1 here; S columns, T = S tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import Batch
from rankfold.serving.loss_request import Datum, ForwardBackward
from rankfold.serving.losses import TokenInputs

_PARTS = {
    "weights": "weights_T", "logprobs": "logprobs_T", "advantages": "advantages_T", "clip_low_threshold": "low_T",
    "clip_high_threshold": "high_T", "sequence_ratio_mask": "mask_T",
}  # fmt: skip


def micro_batches(request: ForwardBackward, tokens: int) -> list[Batch]:
    """Returns the micro-batches of a request, on the host.

    Args:
        request: of a client.
        tokens: of a micro-batch, at most, unless one document alone has more.
    """
    return [_batch(request, place, group) for place, group in enumerate(_groups(request.data, tokens))]


def _groups(data: Sequence[Datum], tokens: int) -> Iterator[list[Datum]]:
    group: list[Datum] = []
    for datum in data:
        if group and sum(len(one.tokens) for one in group) + len(datum.tokens) > tokens:
            yield group
            group = []
        group.append(datum)
    yield group


def _batch(request: ForwardBackward, place: int, group: Sequence[Datum]) -> Batch:
    lengths = tuple(len(datum.tokens) for datum in group)
    found = documents_row([datum.tokens for datum in group], [datum.targets for datum in group])
    inputs = {
        _PARTS[name]: torch.from_numpy(np.concatenate([datum.inputs[name] for datum in group]))
        for name in group[0].inputs
    }
    return found.with_parts(
        TokenInputs(loss=request.loss, numbers=request.numbers, place=place, lengths=lengths, **inputs)
    )


def documents_row(tokens: Sequence[NDArray[np.int64]], targets: Sequence[NDArray[np.int64]]) -> Batch:
    """Returns a micro-batch of one row.

    Args:
        tokens, targets: int64 ids of each document, and what each of its positions is to predict.
    """
    lengths = [len(one) for one in tokens]
    total = sum(lengths)
    return Batch(
        tokens_BS=torch.from_numpy(np.concatenate(tokens))[None],
        labels_BS=torch.from_numpy(np.concatenate(targets))[None],
        positions_BS=torch.cat([torch.arange(one) for one in lengths])[None],
        token_index_BS=torch.arange(total)[None],
        loss_weights_BS=torch.ones(1, total),
        document_offsets=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        document_lengths=tuple(lengths),
    )
