"""Preference objectives: training on pairs of answers, of which one was preferred.

With l the log-likelihood of an answer given its question, summed over its target tokens, l_ref that under the
reference, n its length, and c and r the preferred and the other answer of a pair:

| loss    | of a pair                                                                     | paper            |
|---------|-------------------------------------------------------------------------------|------------------|
| dpo     | -(1 - e) log s(b d) - e log s(-b d),  d = (l - l_ref)_c - (l - l_ref)_r       | arXiv 2305.18290 |
| ipo     | (d / n - 1 / 2b)^2, each side of d divided by its own length                   | arXiv 2310.12036 |
| hinge   | max(0, 1 - b d)                                                                | arXiv 2305.10425 |
| orpo    | -l_c / n_c - b log s(log odds_c - log odds_r),  odds = p / (1 - p), p = e^(l/n) | arXiv 2403.07691 |
| simpo   | -(1 - e) log s(m) - e log s(-m),  m = b (l_c / n_c - l_r / n_r) - g            | arXiv 2405.14734 |

b is beta, e the label smoothing, g simpo's margin. `length_normalised` divides each side of d by its own length for
dpo and hinge too. orpo and simpo need no reference.

Legend: T tokens held here, N answers and P = N / 2 pairs of the micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import Batch
from engine.choices import EntropyUse
from engine.config.objective import ObjectiveOptions
from engine.config.run import RunConfig
from engine.distributed.mesh import Axis
from engine.objectives.objective import ObjectiveSums
from engine.preferences.objectives.likelihood import answers_of, log_likelihoods

CHANCE = math.log(2)
"""The loss of dpo for a policy that is its reference."""


class Preference:
    """A preference objective: the loss of a step is the mean over the pairs of the global batch.

    Args:
        options: the loss and its constants.
        cp: over whose ranks the tokens of each row are split.
    """

    metrics: tuple[str, ...] = (
        "accuracy",
        "margin",
        "reward_chosen",
        "reward_rejected",
        "logp_chosen",
        "logp_rejected",
    )
    """Means over pairs. A reward is b times the side of d that the loss sees: b (l - l_ref), divided by n where lengths
    are normalised, or b l / n where there is no reference."""
    shown: tuple[str, ...] = ("accuracy", "margin")
    maxima: tuple[str, ...] = ()
    temperature = 1.0
    entropy_use: EntropyUse = "none"
    head_loss = None
    baseline = None

    def __init__(self, options: ObjectiveOptions, *, cp: Axis) -> None:
        self.options, self._cp = options, cp
        self.compares_with_base = options.compared_with == "base"
        """Whether the reference is the model without adapters, computed with each step; else the batch brings the
        reference's log-likelihoods, or the loss needs none."""

    @property
    def loss_at_chance(self) -> float | None:
        """The loss of a policy equal to its reference: log 2 for dpo, whatever the smoothing; else None."""
        return CHANCE if self.options.name == "dpo" else None

    def reference(self, token_losses_T: Tensor, batch: Batch) -> Tensor:
        """Returns the answers' log-likelihoods, fp32 [N]."""
        return log_likelihoods(token_losses_T, batch, self._cp)

    def named(self, means: Sequence[float]) -> dict[str, float]:
        """Returns all of `metrics`."""
        return dict(zip(self.metrics, means, strict=True))

    def sums(
        self,
        token_losses_T: Tensor,
        batch: Batch,
        reference: Tensor | None,
        baseline: Tensor | None = None,
        entropies_T: Tensor | None = None,
    ) -> ObjectiveSums:
        """Returns a micro-batch's sums; see engine.objectives.objective.Objective."""
        options, answers = self.options, answers_of(batch)
        logps = log_likelihoods(token_losses_T, batch, self._cp)
        reference = answers.reference_logps if reference is None else reference
        lengths = answers.lengths.clamp(min=1.0)
        if options.compared_with is None:
            scores = logps / lengths
        else:
            assert reference is not None, "an objective with a reference got none"
            scores = logps - reference
            if options.length_normalised or options.name == "ipo":
                scores = scores / lengths
        chosen, rejected = scores.view(-1, 2).unbind(1)
        loss = self._losses(chosen, rejected).sum()
        figures = torch.stack((loss, *self._figures(scores.detach(), logps.detach()))).detach()
        return ObjectiveSums(loss, figures / self._cp.size)  # all ranks of a row have the same figures

    def _losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Returns the losses of the pairs, fp32 [P]."""
        options, difference = self.options, chosen - rejected
        if options.name == "ipo":
            return (difference - 1 / (2 * options.preference_strength)) ** 2
        if options.name == "hinge":
            return F.relu(1 - options.preference_strength * difference)
        if options.name == "orpo":
            odds = difference - (_log_one_minus_exp(chosen) - _log_one_minus_exp(rejected))
            return -chosen - options.preference_strength * F.logsigmoid(odds)
        logits = options.preference_strength * difference - (options.margin if options.name == "simpo" else 0.0)
        smoothing = options.label_smoothing
        if not smoothing:
            return -F.logsigmoid(logits)
        return -(1 - smoothing) * F.logsigmoid(logits) - smoothing * F.logsigmoid(-logits)

    def _figures(self, scores: Tensor, logps: Tensor) -> tuple[Tensor, ...]:
        """Returns sums over pairs, in the order of `metrics`."""
        rewards_chosen, rewards_rejected = (self.options.preference_strength * scores).view(-1, 2).unbind(1)
        logp_chosen, logp_rejected = logps.view(-1, 2).unbind(1)
        better = (rewards_chosen > rewards_rejected).to(scores.dtype)
        margin = rewards_chosen - rewards_rejected
        columns = (better, margin, rewards_chosen, rewards_rejected, logp_chosen, logp_rejected)
        return tuple(column.sum() for column in columns)


def build_preference(config: RunConfig, *, cp: Axis, dp: Axis) -> Preference:
    """Returns the objective over pairs that a configuration names; see `engine.objectives.build.build_objective`."""
    return Preference(config.objective, cp=cp)


def _log_one_minus_exp(x: Tensor) -> Tensor:
    """Returns log(1 - e^x) for x < 0, accurate near 0 and far from it; x = 0 counts as the largest number below 0."""
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    near = torch.log(-torch.expm1(x))
    far = torch.log1p(-torch.exp(x.clamp(max=-CHANCE)))
    return torch.where(x > -CHANCE, near, far)
