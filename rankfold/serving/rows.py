"""Micro-batches of a client's documents: each is one row, in which documents lie one after the other.

Legend: B rows, 1 here; S columns, T = S tokens; K targets of each, where there are several.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import IGNORE_LABEL, Batch, Padding
from engine.models.head_figures import SeveralLabels
from rankfold.serving.loss_request import Datum, ForwardBackward
from rankfold.serving.losses import TokenInputs, Traced

_PARTS = {
    "weights": "weights_T", "logprobs": "logprobs_T", "advantages": "advantages_T", "clip_low_threshold": "low_T",
    "clip_high_threshold": "high_T", "sequence_ratio_mask": "mask_T",
}  # fmt: skip


FILLER = -1
"""Place of a micro-batch that has no documents."""


def micro_batches(request: ForwardBackward, tokens: int, *, copies: int = 1, multiple: int = 1) -> list[list[Batch]]:
    """Returns the micro-batches of a request, on the host: as many for each copy of the model.

    Args:
        request: of a client. Neighbouring documents go to the same copy, about as many tokens to each.
        tokens: of a micro-batch, at most, unless one document alone has more.
        copies: ranks that train on different documents.
        multiple: of the length of a row, which is padded to it.
    """
    shares = _shares([len(datum.tokens) for datum in request.data], copies)
    groups = [list(_groups(request.data[share.start : share.stop], tokens)) for share in shares]
    firsts = [0, *accumulate(map(len, groups))]
    return filled(
        [
            [_batch(request, first + number, group, multiple) for number, group in enumerate(own)]
            for first, own in zip(firsts, groups, strict=False)
        ],
        multiple,
    )


def filled(batches: Sequence[Sequence[Batch]], multiple: int) -> list[list[Batch]]:
    """Returns as many micro-batches for each copy of the model: those that are missing have no documents.

    Args:
        batches: of each copy.
        multiple: of the length of a row.
    """
    most = max(map(len, batches))
    return [[*own, *(_filler(multiple) for _ in range(most - len(own)))] for own in batches]


def _shares(lengths: Sequence[int], copies: int) -> list[range]:
    """Returns the numbers of the documents of each copy."""
    total, before = sum(lengths), 0
    owners = []
    for length in lengths:
        owners.append((2 * before + length) * copies // (2 * total))  # where its middle is
        before += length
    return [range(bisect_left(owners, copy), bisect_right(owners, copy)) for copy in range(copies)]


def _filler(multiple: int) -> Batch:
    nothing = np.zeros(0, np.int64)
    found = documents_row([nothing], [nothing], multiple)
    return found.with_parts(TokenInputs(loss="cross_entropy", numbers={}, place=FILLER, lengths=()))


def _groups(data: Sequence[Datum], tokens: int) -> Iterator[list[Datum]]:
    group: list[Datum] = []
    for datum in data:
        full = sum(len(one.tokens) for one in group) + len(datum.tokens) > tokens
        if group and (full or group[0].targets.shape[1:] != datum.targets.shape[1:]):
            yield group
            group = []
        group.append(datum)
    if group:
        yield group


def _batch(request: ForwardBackward, place: int, group: Sequence[Datum], multiple: int) -> Batch:
    lengths = tuple(len(datum.tokens) for datum in group)
    found = documents_row([datum.tokens for datum in group], [datum.targets for datum in group], multiple)
    if request.images is not None and any(datum.images for datum in group):
        found = request.images.with_images(found, [(datum.tokens, datum.images) for datum in group])
    if request.program is not None:
        names = [*request.program.graph.inputs][1:]
        traced = tuple(tuple(torch.from_numpy(datum.inputs[name]) for name in names) for datum in group)
        return found.with_parts(
            TokenInputs(
                loss=request.loss,
                numbers=request.numbers,
                place=place,
                lengths=lengths,
                traced=Traced(request.program, traced),
            )
        )
    inputs = {
        _PARTS[name]: torch.from_numpy(np.concatenate([datum.inputs[name] for datum in group]))
        for name in group[0].inputs
    }
    return found.with_parts(
        TokenInputs(loss=request.loss, numbers=request.numbers, place=place, lengths=lengths, **inputs)
    )


def documents_row(
    tokens: Sequence[NDArray[np.int64]], targets: Sequence[NDArray[np.int64]], multiple: int = 1
) -> Batch:
    """Returns a micro-batch of one row.

    Args:
        tokens: int64 [T] ids of each document.
        targets: int64 [T] or [T, K] what each of its positions is to predict, IGNORE_LABEL for nothing; K is the same
            for all.
        multiple: of the row's length. Padding is a document that predicts nothing.
    """
    found = [len(one) for one in tokens]
    more = -sum(found) % multiple or (0 if any(found) else multiple)
    lengths = [one for one in (*found, more) if one]
    total = sum(lengths)
    labels = torch.from_numpy(np.concatenate([*targets, np.full((more, *targets[0].shape[1:]), IGNORE_LABEL)]))
    first_BS = (labels if labels.ndim == 1 else labels[:, 0])[None]
    several = None if labels.ndim == 1 else SeveralLabels(labels_KBS=labels.t()[:, None].contiguous())
    padding_BS = torch.arange(total)[None] >= total - more
    return Batch(
        tokens_BS=torch.from_numpy(np.concatenate([*tokens, np.zeros(more, np.int64)]))[None],
        labels_BS=first_BS,
        positions_BS=torch.cat([torch.arange(one) for one in lengths])[None],
        token_index_BS=torch.arange(total)[None],
        loss_weights_BS=(first_BS != IGNORE_LABEL).float(),
        document_offsets=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        document_lengths=tuple(lengths),
    ).with_parts(Padding(padding_BS=padding_BS) if more else None, several)
