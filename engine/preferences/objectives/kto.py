"""KTO: training on single answers, each of which was liked or not (arXiv 2402.01306).

With l the log-likelihood of an answer given its question, summed over its target tokens, l_ref that under the
reference, and r = l - l_ref, the loss of an answer is

    w+ (1 - s(b (r - z)))  where it was liked,   w- (1 - s(b (z - r)))  where it was not,

    z = max(0, mean of r over the mismatched answers),

b being beta, w+ and w- the weights of the two kinds. A mismatched answer is another question's answer put after this
one's question: z estimates how far the model as a whole has moved from the reference, and has no gradient. The mean is
over the mismatched answers of the global batch (in an evaluation, of the whole data set), whatever the layout, which is
why it is computed before the first loss of a step.

Legend: T tokens held here, N answers of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch import Batch
from engine.choices import EntropyUse
from engine.config.objective import ObjectiveOptions
from engine.config.run import RunConfig
from engine.distributed.collectives import all_reduce
from engine.distributed.mesh import Axis
from engine.objectives.objective import ObjectiveSums
from engine.preferences.batch_parts import Mismatched
from engine.preferences.objectives.likelihood import answers_of, log_likelihoods

AT_CHANCE = 0.5
"""The loss of a policy that is its reference, where both weights are 1."""


class MismatchedMean:
    """The baseline z above.

    Args:
        dp: over whose ranks the global batch is split.
    """

    def __init__(self, dp: Axis) -> None:
        self._dp = dp

    def batch(self, trained: Batch) -> Batch:
        """Returns the mismatched answers of a micro-batch; see engine.objectives.objective.Baseline."""
        part = trained.part(Mismatched)
        assert part is not None, "a micro-batch without mismatched answers"
        return part.batch

    def sums(self, batch: Batch, policy: Tensor, reference: Tensor | None) -> Tensor:
        """Returns a micro-batch's sums; see engine.objectives.objective.Baseline."""
        reference = answers_of(batch).reference_logps if reference is None else reference
        assert reference is not None, "an objective with a reference got none"
        return torch.stack(((policy - reference).sum(), torch.ones_like(policy).sum()))

    def of(self, sums: Tensor) -> Tensor:
        """Returns the mean, at least 0; see engine.objectives.objective.Baseline."""
        total, count = all_reduce(sums, self._dp).unbind()
        return (total / count.clamp(min=1.0)).clamp(min=0.0)


class Kto:
    """The KTO objective: the loss of a step is the mean over the answers of the global batch.

    Args:
        options: the constants.
        cp: over whose ranks the tokens of each row are split.
        dp: over whose ranks the global batch is split.
    """

    metrics: tuple[str, ...] = (
        "desirable",
        "reward_desirable",
        "reward_undesirable",
        "logp_desirable",
        "logp_undesirable",
        "kl",
    )
    """Share of liked answers; b r and l, summed over the answers of one kind and divided by the number of all; z."""
    shown: tuple[str, ...] = ("margin", "kl")
    maxima: tuple[str, ...] = ()
    temperature = 1.0
    entropy_use: EntropyUse = "none"
    head_loss = None

    def __init__(self, options: ObjectiveOptions, *, cp: Axis, dp: Axis) -> None:
        self.options, self.compares_with_base = options, options.compared_with == "base"
        self.baseline = MismatchedMean(dp)
        self._cp = cp

    @property
    def loss_at_chance(self) -> float | None:
        """The loss of a policy equal to its reference: a half where liked and disliked answers weigh 1, else None."""
        options = self.options
        return AT_CHANCE if options.desirable_weight == options.undesirable_weight == 1 else None

    def reference(self, token_losses_T: Tensor, batch: Batch) -> Tensor:
        """Returns the answers' log-likelihoods, fp32 [N]."""
        return log_likelihoods(token_losses_T, batch, self._cp)

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
        assert reference is not None and baseline is not None, "an objective with a reference and a baseline got none"
        ratios, liked = logps - reference, answers.signs > 0
        weights = torch.where(liked, options.desirable_weight, options.undesirable_weight)
        loss = (weights * torch.sigmoid(-options.preference_strength * answers.signs * (ratios - baseline))).sum()
        rewards, held = options.preference_strength * ratios.detach(), logps.detach()
        columns = (
            liked.to(rewards.dtype),
            rewards * liked,
            rewards * ~liked,
            held * liked,
            held * ~liked,
            baseline.expand_as(rewards),
        )
        figures = torch.stack((loss.detach(), *(column.sum() for column in columns)))
        return ObjectiveSums(loss, figures / self._cp.size)  # all ranks of a row have the same figures

    def named(self, means: Sequence[float]) -> dict[str, float]:
        """Returns means over the answers of each kind; a kind that did not occur is omitted, and so is the margin
        then.
        """
        liked, *kinds, kl = means
        found: dict[str, float] = {}
        for name, values in (("reward", kinds[:2]), ("logp", kinds[2:])):
            for kind, value, share in zip(("desirable", "undesirable"), values, (liked, 1 - liked), strict=True):
                if share > _NO_SHARE:
                    found[f"{name}_{kind}"] = value / share
        if "reward_desirable" in found and "reward_undesirable" in found:
            found["margin"] = found["reward_desirable"] - found["reward_undesirable"]
        return {**found, "desirable": liked, "kl": kl}


def build_kto(config: RunConfig, *, cp: Axis, dp: Axis) -> Kto:
    """Returns the KTO objective of a configuration; see `engine.objectives.build.build_objective`."""
    return Kto(config.objective, cp=cp, dp=dp)


_NO_SHARE = 1e-6
"""A share below this is rounding error: no batch has a million answers."""
