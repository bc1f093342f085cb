"""The objective of a reward model: of two answers to a question, the preferred one is to have the higher score.

With c and r the scores of the preferred and of the other answer of a pair, m its margin (0 where its record has none),
and w the coefficient that keeps scores around 0,

    -log s(c - r - m) + w (c + r)^2

is the loss of the pair (Bradley and Terry; arXiv 2307.09288 for margins, 2312.09244 for the last term).

Legend: T tokens held here, N answers and P = N / 2 pairs of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import Batch
from engine.choices import EntropyUse
from engine.config.run import RunConfig
from engine.distributed.differentiable import reduce_from_all
from engine.distributed.mesh import Axis
from engine.judges.batch_parts import ScoredAnswers
from engine.objectives.objective import ObjectiveSums


class BradleyTerry:
    """The objective: the loss of a step is the mean over the pairs of the global batch.

    Args:
        centre: w above.
        cp: the axis over whose ranks the tokens of each row are split.
    """

    metrics: tuple[str, ...] = ("accuracy", "margin", "reward_chosen", "reward_rejected", "reward")
    """Means over pairs: whether the preferred answer has the higher score, by how much, both scores, and their mean."""
    shown: tuple[str, ...] = ("accuracy", "margin")
    maxima: tuple[str, ...] = ()
    temperature = 1.0
    entropy_use: EntropyUse = "none"
    head_loss = None
    loss_at_chance: float | None = None
    compares_with_base = False
    baseline = None

    def __init__(self, *, centre: float, cp: Axis) -> None:
        self._centre, self._cp = centre, cp

    def reference(self, token_losses_T: Tensor, batch: Batch) -> Tensor:
        """Raises: this objective has no reference."""
        raise NotImplementedError

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
        """Returns a micro-batch's sums; see `engine.objectives.objective.Objective`.

        Args:
            token_losses_T: each token's score.
        """
        answers = batch.part(ScoredAnswers)
        assert answers is not None, "a batch without answers"
        chosen, rejected = self._scores(token_losses_T, answers).view(-1, 2).unbind(1)
        losses = -F.logsigmoid(chosen - rejected - answers.margins)
        if self._centre:
            losses = losses + self._centre * (chosen + rejected) ** 2
        loss, held = losses.sum(), (chosen.detach(), rejected.detach())
        difference, mean = held[0] - held[1], (held[0] + held[1]) / 2
        columns = ((difference > 0).to(mean.dtype), difference, *held, mean)
        figures = torch.stack((loss.detach(), *(column.sum() for column in columns)))
        return ObjectiveSums(loss, figures / self._cp.size)  # all ranks of a row have the same figures

    def _scores(self, scores_T: Tensor, answers: ScoredAnswers) -> Tensor:
        """Returns the score of each answer, fp32 [N], the same on all ranks of its row; differentiable."""
        numbers = torch.arange(2 * answers.margins.shape[0], device=scores_T.device)
        # no atomic additions: the same bits in every run
        held = torch.where(answers.numbers_BS.flatten() == numbers[:, None], scores_T, 0.0).sum(dim=1)
        return reduce_from_all(held, self._cp)


def build_bradley_terry(config: RunConfig, *, cp: Axis, dp: Axis) -> BradleyTerry:
    """Returns the objective of a configuration; see `engine.objectives.build.build_objective`."""
    return BradleyTerry(centre=config.objective.center_rewards_coefficient, cp=cp)
