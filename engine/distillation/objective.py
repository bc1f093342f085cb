"""The objective of distillation on given texts: the loss of distributions, summed over the target tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from engine.batch import Batch
from engine.config.distillation import DistillationOptions
from engine.config.run import RunConfig
from engine.distillation.losses import FIGURES, DistributionLoss, TopTokensLoss, WholeLoss
from engine.distillation.teacher_states import TeacherStates
from engine.distillation.top_tokens import TeacherTokens
from engine.distributed.mesh import Axis
from engine.objectives.language_modeling import LanguageModeling
from engine.objectives.objective import ObjectiveSums


class Distillation(LanguageModeling):
    """Sums the losses of `engine.distillation.losses` over target tokens; the loss of a step is their mean.

    Args:
        options: of the run.
    """

    metrics = FIGURES[1:]
    shown = metrics

    def __init__(self, options: DistillationOptions) -> None:
        self.options = options

    def head_loss(self, batch: Batch) -> DistributionLoss:  # type: ignore[override]
        """Returns the loss of a micro-batch, which has a teacher's tokens or the states of teachers."""
        options = self.options
        shared: dict[str, Any] = {
            "labels_T": batch.labels_BS.flatten(),
            "temperature": options.temperature,
            "label_share": options.label_share,
        }
        states = batch.part(TeacherStates)
        if states is not None:
            return WholeLoss(teachers=states.teachers(), weights=options.factors, beta=options.beta, **shared)
        tokens = batch.part(TeacherTokens)
        assert tokens is not None, "a batch without a teacher"
        return TopTokensLoss(
            ids_KT=tokens.ids_KBS.flatten(1).long(),
            logps_KT=tokens.logps_KBS.flatten(1),
            bucket=options.remainder == "bucket",
            **shared,
        )

    def reference(self, token_losses_T: Tensor, batch: Batch) -> Tensor:
        """Returns the log-probability of each label, fp32 [T], which is recorded of sampled completions."""
        return -token_losses_T

    def named(self, means: Sequence[float]) -> dict[str, float]:
        """Returns the divergence and the negative log-likelihood of labels."""
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
            token_losses_T: fp32 [T, F] figures.
        """
        sums_F = (token_losses_T * batch.loss_weights_BS.flatten()[:, None]).sum(0)
        return ObjectiveSums(sums_F[0], sums_F.detach())


def build_distillation(config: RunConfig, *, cp: Axis, dp: Axis) -> Distillation:
    """Returns the objective of distillation; see `engine.objectives.build.build_objective`."""
    return Distillation(config.distillation)
