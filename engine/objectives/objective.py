"""The interface between the last stage of a step and an objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from engine.batch import Batch
from engine.choices import EntropyUse
from engine.ops.block_loss import BlockLoss


class ObjectiveSums(NamedTuple):
    """A micro-batch's contribution to a step, as sums that are divided by the global batch's weight afterwards.

    Args:
        loss: 0-dim fp32, differentiable. Under context parallelism it is either a sum over the tokens that this rank
            holds, or the same on all ranks of a row, with a gradient that reaches the tokens that this rank holds.
        figures: fp32 [1 + metrics] without gradient: the loss, then the objective's metrics, whose sums over all ranks
            of dp and cp are those of the global batch.
        maxima: fp32 [maxima], the largest that this rank has of each; None where the objective has none.
    """

    loss: Tensor
    figures: Tensor
    maxima: Tensor | None = None


class Baseline(Protocol):
    """A number of the whole global batch, computed before its first loss from rows other than the trained ones."""

    def batch(self, trained: Batch) -> Batch:
        """Returns the rows that a micro-batch's part of the number is computed from."""
        ...

    def sums(self, batch: Batch, policy: Tensor, reference: Tensor | None) -> Tensor:
        """Returns a micro-batch's sums.

        Args:
            batch: as `batch` gave it for the micro-batch.
            policy: as `Objective.reference` gave it for these rows and the current model.
            reference: the same for the model without adapters; None where it is not computed with each step.

        Returns:
            fp32 [2]: a sum, and the number of its terms.
        """
        ...

    def of(self, sums: Tensor) -> Tensor:
        """Returns the number, 0-dim fp32. Collective over the data-parallel ranks that call it.

        Args:
            sums: fp32 [2], the sums of this rank's micro-batches.
        """
        ...


class Shown(Protocol):
    """The part of an objective that `figures_to_show` reads."""

    @property
    def shown(self) -> tuple[str, ...]: ...


def figures_to_show(objective: Shown, reported: Mapping[str, float]) -> dict[str, float]:
    """Returns the reported figures that a progress line shows.

    A model that is still its own reference has margins of exactly 0, for which accuracy is meaningless.
    """
    undecided = reported.get("margin") == 0
    return {
        name: reported[name] for name in objective.shown if name in reported and not (undecided and name == "accuracy")
    }


class Objective(Protocol):
    """Turns token losses into the loss of a micro-batch."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the figures that are summed beside the loss; see `named` for those that are reported."""
        ...

    @property
    def maxima(self) -> tuple[str, ...]:
        """Names of the figures of which the largest of the global batch is taken."""
        ...

    @property
    def temperature(self) -> float:
        """The divisor of logits."""
        ...

    @property
    def entropy_use(self) -> EntropyUse:
        """What `sums` takes of the entropies of the tokens' distributions."""
        ...

    @property
    def head_loss(self) -> Callable[[Batch], BlockLoss] | None:
        """Returns the loss of a micro-batch's distributions, whose figures [T, F] `sums` then takes in place of the
        negative log-likelihoods; None where it takes these."""
        ...

    @property
    def shown(self) -> tuple[str, ...]:
        """Names of the reported figures that a progress line shows."""
        ...

    @property
    def loss_at_chance(self) -> float | None:
        """The loss of an untrained model; None where it has no fixed value."""
        ...

    @property
    def compares_with_base(self) -> bool:
        """Whether each micro-batch must go through the model without adapters first; see `reference`."""
        ...

    @property
    def baseline(self) -> Baseline | None:
        """The number of the whole global batch that the first loss needs; None where none is needed."""
        ...

    def reference(self, token_losses_T: Tensor, batch: Batch) -> Tensor:
        """Returns the result of a pass without adapters that `sums` takes."""
        ...

    def named(self, means: Sequence[float]) -> dict[str, float]:
        """Returns the figures to report, by name.

        Args:
            means: of each of `metrics`, over the global batch, and behind them each of `maxima`.
        """
        ...

    def sums(
        self,
        token_losses_T: Tensor,
        batch: Batch,
        reference: Tensor | None,
        baseline: Tensor | None = None,
        entropies_T: Tensor | None = None,
    ) -> ObjectiveSums:
        """Returns a micro-batch's sums.

        Args:
            token_losses_T: fp32 [T] negative log-likelihoods; [T, F] where there is a `head_loss`.
            batch: their labels and weights.
            reference: as `reference` gave it for this batch; None where the objective has none, or the batch brings it.
            baseline: as `baseline` gave it for the global batch; None where there is none.
            entropies_T: fp32 [T], with a gradient where `entropy_use` says so; None where they are not needed.
        """
        ...
