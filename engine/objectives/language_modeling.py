"""Next-token prediction: pretraining and supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.batch import Batch
from engine.choices import EntropyUse
from engine.config.run import RunConfig
from engine.distributed.mesh import Axis
from engine.objectives.objective import ObjectiveSums


class LanguageModeling:
    """The language-modeling objective: the sum of weighted token losses.

    The loss of a step is this sum over the global batch, divided by the sum of the weights over the global batch: the
    mean over target tokens, whatever the number of micro-batches and ranks.
    """

    metrics: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    maxima: tuple[str, ...] = ()
    temperature = 1.0
    entropy_use: EntropyUse = "none"
    head_loss = None
    loss_at_chance: float | None = None
    compares_with_base = False
    baseline = None

    def loss_sum(self, token_losses_T: Tensor, batch: Batch) -> Tensor:
        """Returns the 0-dim fp32 sum over the micro-batch.

        Args:
            token_losses_T: fp32 [T] negative log-likelihoods.
            batch: their labels and weights.
        """
        return (token_losses_T * batch.loss_weights_BS.flatten()).sum()

    def reference(self, token_losses_T: Tensor, batch: Batch) -> Tensor:
        """Raises: this objective has no reference."""
        raise NotImplementedError

    def named(self, means: Sequence[float]) -> dict[str, float]:
        """Returns no metrics beside the loss."""
        return {}

    def sums(
        self,
        token_losses_T: Tensor,
        batch: Batch,
        reference: Tensor | None,
        baseline: Tensor | None = None,
        entropies_T: Tensor | None = None,
    ) -> ObjectiveSums:
        """Returns a micro-batch's sums; see engine.objectives.objective.Objective."""
        loss = self.loss_sum(token_losses_T, batch)
        return ObjectiveSums(loss, loss.detach()[None])


def build_language_modeling(config: RunConfig, *, cp: Axis, dp: Axis) -> LanguageModeling:
    """Returns the language-modeling objective; see `engine.objectives.build.build_objective`."""
    return LanguageModeling()
