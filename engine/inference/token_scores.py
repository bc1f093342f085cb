"""Log-probabilities of chosen, of the most likely, and of drawn tokens at each position of a row, from one pass.

    log p(v) = z_v - log sum_w exp(z_w),   z = logits / temperature

The arithmetic is that of training's loss: the log-probability of a label is the one that training gives it.

Legend: T tokens of a row, K ids of each, V vocabulary rows held here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import IGNORE_LABEL, Batch
from engine.distributed.collectives import all_gather
from engine.inference.model_part import chooser_of
from engine.inference.options import Sampling
from engine.models.decoder import Decoder
from engine.models.head_figures import SeveralLabels
from engine.ops.attention.token_context import TokenContext
from engine.ops.head_loss import block_tokens
from engine.ops.several_labels import several_label_losses

_SEED = 0x616C74
"""Keeps numbers of draws apart from those of completions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked about each position of a row, beside its labels.

    Args:
        best: how many of the most likely tokens.
        drawn: how many tokens to draw, with replacement.
        row: number of the first draw's row, a coordinate of its random numbers; the others have the next ones.
        draw_temperature: that draws are made with; 0 takes the most likely token.
        temperature: of the log-probabilities.
    """

    best: int = 0
    drawn: int = 0
    row: int = 0
    draw_temperature: float = 1.0
    temperature: float = 1.0


@torch.no_grad()
def token_scores(model: Decoder, out: Tensor, batch: Batch, context: TokenContext, question: Question) -> Tensor:
    """Returns fp64 [T, 2 K], the ids of tokens and then their log-probabilities: of the row's `SeveralLabels`, of the
    most likely tokens with the most likely first, and of those that were drawn. Collective over the tensor-parallel
    ranks, equal on all of them.

    Args:
        model: the part of the model that has the head.
        out: what its last layer gave.
        batch, context: of the tokens.
        question: what is asked.
    """
    labels = batch.part(SeveralLabels)
    labels_KT = None if labels is None else labels.labels_KBS.flatten(1)
    places_T = batch.positions_BS.flatten() + 1
    # where weights are gathered from other ranks, each of these calls it as often as the others, whatever their tokens
    if model.layout.splits_tokens or not model.has_resident_weights:
        return _block_scores(model, model.logits(out, context), labels_KT, places_T, question)
    # a draw has a wide random number for each logit
    wide = 16 if question.drawn else 1
    size = block_tokens(wide * out.element_size() * model.vocab_spec.local_shape[0], 1)
    found = []
    for start in range(0, len(out), size):
        block = slice(start, start + size)
        own_KT = None if labels_KT is None else labels_KT[:, block]
        found.append(_block_scores(model, model.logits(out[block], context), own_KT, places_T[block], question))
    return torch.cat(found)


def _block_scores(
    model: Decoder, logits_TV: Tensor, labels_KT: Tensor | None, places_T: Tensor, question: Question
) -> Tensor:
    pieces = model.vocab_spec.pieces
    first_id, num_ids = (pieces[0].global_offset, pieces[0].length) if pieces else (model.config.vocab_size, 0)
    ids = [] if labels_KT is None else [labels_KT]
    if question.best:
        ids.append(_most_likely(model, logits_TV[:, :num_ids], question.best, first_id))
    if question.drawn:
        sampling = Sampling(temperature=question.draw_temperature, seed=_SEED)
        chooser = chooser_of(model, sampling, slots=1, device=logits_TV.device)
        zeros_T = torch.zeros_like(places_T)
        rows = [torch.full_like(places_T, question.row + number) for number in range(question.drawn)]
        ids.append(torch.stack([chooser.choose(logits_TV, zeros_T, row_T, places_T) for row_T in rows]))
    if not ids:
        return torch.zeros(len(places_T), 0, dtype=torch.float64, device=logits_TV.device)
    ids_KT = torch.cat(ids)
    if question.temperature != 1.0:
        logits_TV = logits_TV / question.temperature
    # the logits are capped already
    losses_TK = several_label_losses(
        logits_TV, ids_KT, first_id=first_id, num_ids=num_ids, axis=model.layout.tp, kernels=model.layout.kernels
    )
    return torch.cat((ids_KT.t().double(), -losses_TK.double()), dim=1)


def _most_likely(model: Decoder, held_TV: Tensor, count: int, first_id: int) -> Tensor:
    """Returns int64 [count, T] ids."""
    axis, own = model.layout.tp, min(count, held_TV.shape[1])
    values_TC = torch.full((len(held_TV), count), -torch.inf, dtype=torch.float64, device=held_TV.device)
    ids_TC = torch.full_like(values_TC, IGNORE_LABEL)
    if own:
        best = held_TV.topk(own, dim=1)
        values_TC[:, :own] = best.values.double()
        ids_TC[:, :own] = (best.indices + first_id).double()
    if axis.size > 1:
        both = all_gather(torch.stack((values_TC.t(), ids_TC.t()), 1), axis)  # [ranks * count, 2, T]
        values_TC, ids_TC = both[:, 0].t(), both[:, 1].t()
        ids_TC = ids_TC.gather(1, values_TC.topk(count, dim=1).indices)
    return ids_TC.long().t()
