"""Log-probabilities of continuations, by passes over whole rows: those of the evaluation loss, in every layout.

Continuations of one token that follow the same text are labels of one row, which is computed once. Rows are sorted by
length, so that those of a batch need little padding. Copies of the model compute different batches. A rank sums over
the labelled tokens that it holds, and the sums are added over all ranks at the end, so that nothing else is sent.

Legend: B rows, S columns, T = B * S tokens, K continuations of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from engine.batch import IGNORE_LABEL, Batch
from engine.data.collate import build_batch, context_part, row_length
from engine.data.dataset import TokenDataset, dataset_of
from engine.data.row_shape import round_up
from engine.distributed.collectives import all_reduce
from engine.inference.token_scores import Question, token_scores
from engine.models.decoder import Decoder
from engine.models.head_figures import SeveralLabels
from engine.ops.attention.token_context import TokenContext
from engine.training.evaluate import group_size
from rankfold.evaluating.model import EvaluatedModel
from rankfold.evaluating.watch import Watch


class Continuation(NamedTuple):
    """A text before, and what may follow: token ids, at least one each."""

    before: Sequence[int]
    after: Sequence[int]


class Score(NamedTuple):
    """The sum of a continuation's log-probabilities, and whether each of its tokens is the most likely one."""

    logp: float
    is_greedy: bool


@dataclass(slots=True)
class _Row:
    """A row, and the continuations that end it, by their places in the list."""

    ids: tuple[int, ...]
    members: list[tuple[int, tuple[int, ...]]]


def scores(model: EvaluatedModel, continuations: Sequence[Continuation], tokens: int, watch: Watch) -> list[Score]:
    """Returns the score of each continuation, the same on all ranks. Collective.

    Args:
        continuations: no longer together than the model's context and one token more.
        tokens: of a batch, at most, unless one row alone has more.
        watch: told of the continuations that were computed on any rank.
    """
    if not continuations:
        return []
    rows = _rows(continuations)
    longest = max(len(row.ids) for row in rows)
    data = dataset_of(
        [(row.ids, [False] * len(row.ids)) for row in rows],
        seq_length=round_up(longest, model.shape.pad_multiple * 2 * model.shape.context_size),
    )
    batches = _batches(rows, tokens)
    copies = model.mesh.dp
    own = batches[copies.rank :: copies.size]
    passes, size = -(-len(batches) // copies.size), group_size(model.mesh)
    model.prepare()
    total = torch.zeros(len(continuations), 2, dtype=torch.float64)
    for first in range(0, passes, size):
        end = min(first + size, passes)
        group = [own[number] if number < len(own) else [] for number in range(first, end)]
        found = model.stages.read_head([_batch(model, data, rows, batch) for batch in group], _sums)
        for batch, sums in zip(group, found or (), strict=False):
            _add(total, [rows[number] for number in batch], sums.cpu())
        computed = batches[first * copies.size : end * copies.size]
        watch.advance(sum(len(rows[number].members) for batch in computed for number in batch))
        watch.passed()
    total = all_reduce(all_reduce(total.to(model.device), model.mesh.dp_cp), model.mesh.pp).cpu()
    return [Score(logp, misses == 0) for logp, misses in total.tolist()]


def _rows(continuations: Sequence[Continuation]) -> list[_Row]:
    """Returns the rows, the longest first."""
    found: dict[tuple[int, ...], _Row] = {}
    for place, (before, after) in enumerate(continuations):
        ids = (*before, *after[:-1])
        found.setdefault(ids, _Row(ids, [])).members.append((place, tuple(after)))
    return sorted(found.values(), key=lambda row: (-len(row.ids), row.ids))


def _batches(rows: Sequence[_Row], tokens: int) -> list[list[int]]:
    """Returns the rows of each batch, by number."""
    batches: list[list[int]] = []
    for number in range(len(rows)):
        # the first row of a batch is its longest
        if batches and (len(batches[-1]) + 1) * len(rows[batches[-1][0]].ids) <= tokens:
            batches[-1].append(number)
        else:
            batches.append([number])
    return batches


def _batch(model: EvaluatedModel, data: TokenDataset, rows: Sequence[_Row], numbers: Sequence[int]) -> Batch:
    """Returns this rank's part of a batch, on the host; without numbers, one of padding."""
    shape, held = model.shape, list(numbers) or [None]
    whole = build_batch(data, held, range(len(held)), length=row_length(data, held, shape), shape=shape)
    count = max((len(rows[number].members) for number in numbers), default=1)
    labels_KBS = torch.full((count, *whole.tokens_BS.shape), IGNORE_LABEL)
    for b, number in enumerate(numbers):
        row = rows[number]
        for k, (_, after) in enumerate(row.members):
            labels_KBS[k, b, len(row.ids) - len(after) : len(row.ids)] = torch.tensor(after)
    whole = whole.with_parts(SeveralLabels(labels_KBS=labels_KBS))
    return context_part(whole, size=shape.context_size, rank=shape.context_rank)


def _sums(model: Decoder, out: Tensor, batch: Batch, context: TokenContext) -> Tensor:
    """Returns fp64 [B, K, 2]: sums of the log-probabilities of the labels that this rank holds, and the number of
    those that are not the most likely tokens."""
    labels = batch.part(SeveralLabels)
    assert labels is not None
    labels_KT = labels.labels_KBS.flatten(1)
    sums = torch.zeros(batch.num_rows, len(labels_KT), 2, dtype=torch.float64, device=out.device)
    rows_T = torch.arange(batch.num_tokens, device=out.device) // batch.row_length
    if not model.layout.splits_tokens:  # most tokens are of texts before, and need no logits
        here = (labels_KT != IGNORE_LABEL).any(dim=0).nonzero().flatten()
        if not len(here):
            here = here.new_zeros(1)  # other ranks may gather the head's weights with this one
        out, labels_KT, rows_T = out[here], labels_KT[:, here], rows_T[here]
        part = SeveralLabels(labels_KBS=labels_KT[:, None])
        batch = replace(batch, positions_BS=batch.positions_BS.flatten()[None, here], parts=(part,))
    found_TK = token_scores(model, out, batch, context, Question(best=1))
    count = len(labels_KT)
    best_T, logps_TK = found_TK[:, count].long(), found_TK[:, count + 1 : -1]
    is_label_TK = (labels_KT != IGNORE_LABEL).t()
    misses_TK = is_label_TK & (labels_KT.t() != best_T[:, None])
    figures = torch.stack((torch.where(is_label_TK, logps_TK, 0.0), misses_TK.double()), dim=2)
    return sums.index_add_(0, rows_T, figures)


def _add(total: Tensor, rows: Sequence[_Row], sums: Tensor) -> None:
    for row, own in zip(rows, sums, strict=False):  # one of padding has no row
        for (place, _), figures in zip(row.members, own, strict=False):  # others of the batch may have more
            total[place] += figures
