"""What is minimised: the interface between the last stage of a step and an objective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from engine.batch import Batch


class ObjectiveSums(NamedTuple):
    """What a micro-batch adds to a step, as sums that are divided by the global batch's weight afterwards.

    Args:
        loss: 0-dim fp32, differentiable. Under context parallelism it is the same on all ranks of a row, and its
            gradient reaches the tokens that this rank holds.
        figures: fp32 [1 + metrics] without gradient: the loss, then the objective's metrics, whose sums over all ranks
            of dp and cp are those of the global batch.
    """

    loss: Tensor
    figures: Tensor


class Baseline(Protocol):
    """One number of the whole global batch, made of what the model says of mismatched answers."""

    def sums(self, mismatched: Batch, policy: Tensor, reference: Tensor | None) -> Tensor:
        """Returns what a micro-batch adds.

        Args:
            mismatched: the micro-batch's `mismatched`.
            policy: as `Objective.reference` gave it for `mismatched` and the model as it is.
            reference: the same for the model without adapters; None where it is not computed with each step.

        Returns:
            fp32 [2]: a sum, and how many it is of.
        """
        ...

    def of(self, sums: Tensor) -> Tensor:
        """0-dim fp32, the number. Collective over the data-parallel ranks that call it.

        Args:
            sums: fp32 [2], what this rank's micro-batches add.
        """
        ...


class Shown(Protocol):
    """What `figures_to_show` reads of an objective."""

    @property
    def shown(self) -> tuple[str, ...]: ...


def figures_to_show(objective: Shown, reported: Mapping[str, float]) -> dict[str, float]:
    """Returns what a line of progress shows of what is reported.

    A model that is still its own reference has margins of exactly 0, of which an accuracy would say nothing.
    """
    undecided = reported.get("margin") == 0
    return {
        name: reported[name] for name in objective.shown if name in reported and not (undecided and name == "accuracy")
    }


class Objective(Protocol):
    """Turns token losses into the loss of a micro-batch."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of what is summed beside the loss; see `named` for what is reported of it."""
        ...

    @property
    def shown(self) -> tuple[str, ...]:
        """What a line of progress shows of what is reported."""
        ...

    @property
    def loss_at_chance(self) -> float | None:
        """The loss of a model that has learnt nothing; None where it has no fixed value."""
        ...

    @property
    def compares_with_base(self) -> bool:
        """Whether each micro-batch must go through the model without adapters first; see `reference`."""
        ...

    @property
    def baseline(self) -> Baseline | None:
        """What must be known of the whole global batch before the first loss; None where nothing must."""
        ...

    def reference(self, token_losses_T: Tensor, batch: Batch) -> Tensor:
        """Returns what is kept of a pass without adapters, to be given to `sums`."""
        ...

    def named(self, means: Sequence[float]) -> dict[str, float]:
        """Returns what is reported.

        Args:
            means: of each of `metrics`, over the global batch.
        """
        ...

    def sums(
        self, token_losses_T: Tensor, batch: Batch, reference: Tensor | None, baseline: Tensor | None = None
    ) -> ObjectiveSums:
        """Returns what a micro-batch adds.

        Args:
            token_losses_T: fp32 [T] negative log-likelihoods.
            batch: their labels and weights.
            reference: as `reference` gave it for this batch; None where none was asked for.
            baseline: as `baseline` gave it for the global batch; None where there is none.
        """
        ...
