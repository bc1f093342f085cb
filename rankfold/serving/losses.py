"""The losses of the protocol: sums over tokens, of log-probabilities and what the client sends with each token.

With l the log-probability of a target, o the one that it was sampled with, A its advantage, w its weight and
r = exp(l - o), low and high the limits of r, 0.8 and 1.2 unless the client gives others:

    cross_entropy        -sum w l                          w = 1 where none is given
    importance_sampling  -sum r A
    ppo                  -sum min(r A, clip(r, low, high) A)            (arXiv 1707.06347)
    cispo                -sum stop(clip(r, low, high)) A l              (arXiv 2506.13585)
    dro                  -sum (l A - beta / 2 (l - o)^2)                beta 0.05 unless given (arXiv 2405.19107)
    gspo                 as ppo, with s in place of r: s = exp(mean (l - o)) over the tokens of the datum that
                         sequence_ratio_mask marks, all where there is none; each of the datum's tokens has a term
                         (arXiv 2507.18071)
    custom               the sum of a function of each datum that the client has traced (`loss_program.py`)

Where a token has several targets, l and w have a column for each, and sums are over all of them.

Legend: T tokens, K targets of each, where there are several.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from engine.batch import Batch, BatchPart
from engine.distributed.mesh import Axis
from engine.objectives.language_modeling import LanguageModeling
from rankfold.serving.loss_program import LossProgram, gradient_of
from rankfold.serving.whole_rows import whole_row

_LOW, _HIGH, _BETA = 0.8, 1.2, 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenInputs(BatchPart):
    """What the loss of a micro-batch takes beside log-probabilities.

    Args:
        loss: its name.
        numbers: of loss_fn_config.
        place: of the micro-batch in its request.
        lengths: tokens of each datum, which lie one after the other.
        weights_T, logprobs_T, advantages_T, low_T, high_T, mask_T: float32 [T] or [T, K]; None where the client sent
            none.
        traced: the program of a loss that the client has traced, and its inputs of each datum; None for other losses.
    """

    for_loss_alone: ClassVar[bool] = True
    loss: str
    numbers: Mapping[str, float]
    place: int
    lengths: tuple[int, ...]
    weights_T: Tensor | None = None
    logprobs_T: Tensor | None = None
    advantages_T: Tensor | None = None
    low_T: Tensor | None = None
    high_T: Tensor | None = None
    mask_T: Tensor | None = None
    traced: Traced | None = None


@dataclass(frozen=True, slots=True)
class Traced:
    """A loss that the client has traced, and its inputs.

    Args:
        program: checked on each datum.
        inputs: of each datum, on the host.
    """

    program: LossProgram
    inputs: tuple[tuple[Tensor, ...], ...]


def loss_and_metrics(logps_T: Tensor, inputs: TokenInputs) -> tuple[Tensor, Tensor]:
    """Returns the 0-dim fp32 loss of a micro-batch, see the module; and fp64 [metrics], the sums of the metrics of a
    loss that the client has traced.

    Args:
        logps_T: fp32 [T] or [T, K] log-probabilities of the targets.
        inputs: of the micro-batch.
    """
    if inputs.traced is not None:
        return gradient_of(inputs.traced.program, logps_T, inputs.lengths, inputs.traced.inputs)
    return loss_sum(logps_T, inputs), logps_T.new_zeros(0, dtype=torch.float64)


def loss_sum(logps_T: Tensor, inputs: TokenInputs) -> Tensor:
    """Returns the loss of `loss_and_metrics`, of those that are not traced."""
    if inputs.loss == "cross_entropy":
        return -(logps_T if inputs.weights_T is None else logps_T * inputs.weights_T).sum()
    assert inputs.logprobs_T is not None and inputs.advantages_T is not None
    difference, advantages = logps_T - inputs.logprobs_T, inputs.advantages_T
    if inputs.loss == "importance_sampling":
        return -(difference.exp() * advantages).sum()
    if inputs.loss == "dro":
        beta = inputs.numbers.get("beta", _BETA)
        return -(logps_T * advantages - 0.5 * beta * difference.square()).sum()
    if inputs.loss == "gspo":
        difference = _means(difference, inputs)
    ratio = difference.exp()
    clipped = torch.minimum(torch.maximum(ratio, _bound(ratio, inputs, "low")), _bound(ratio, inputs, "high"))
    if inputs.loss == "cispo":
        return -(clipped.detach() * advantages * logps_T).sum()
    assert inputs.loss in ("ppo", "gspo")
    return -torch.minimum(ratio * advantages, clipped * advantages).sum()


def _bound(ratio_T: Tensor, inputs: TokenInputs, end: str) -> Tensor:
    given = inputs.low_T if end == "low" else inputs.high_T
    if given is not None:
        return given
    default = _LOW if end == "low" else _HIGH
    return torch.full_like(ratio_T, inputs.numbers.get(f"clip_{end}_threshold", default))


def _means(difference_T: Tensor, inputs: TokenInputs) -> Tensor:
    """Returns [T] the mean over each datum's marked tokens, in the places of all of its tokens."""
    means = []
    masks = torch.ones_like(difference_T) if inputs.mask_T is None else inputs.mask_T
    for own, mask in zip(difference_T.split(inputs.lengths), masks.split(inputs.lengths), strict=True):
        mean = (own * mask).sum() / mask.sum().clamp(min=1.0)
        means.append(mean.expand_as(own))
    return torch.cat(means)


@dataclass
class ClientLoss(LanguageModeling):
    """The objective of a model that clients train: each micro-batch brings its loss.

    Args:
        context: the ranks that share a row.
        logps: the log-probabilities of the micro-batches that went through it, by their place in the request.
        metric_sums: fp64 sums of their metrics.
    """

    context: Axis = field(default_factory=lambda: Axis("cp"))
    logps: dict[int, Tensor] = field(default_factory=dict)
    metric_sums: dict[int, Tensor] = field(default_factory=dict)

    def begin(self) -> None:
        """Forgets the micro-batches of earlier requests."""
        self.logps.clear()
        self.metric_sums.clear()

    def loss_sum(self, token_losses_T: Tensor, batch: Batch) -> Tensor:
        """Returns the 0-dim fp32 loss that the micro-batch brings; of ranks that share a row, the first alone has a
        value other than 0."""
        inputs = batch.part(TokenInputs)
        assert inputs is not None
        logps = -whole_row(token_losses_T, sum(inputs.lengths), self.context)
        self.logps[inputs.place] = logps.detach()
        loss, self.metric_sums[inputs.place] = loss_and_metrics(logps, inputs)
        return loss if self.context.rank == 0 else loss - loss.detach()
