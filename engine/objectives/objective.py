"""What is minimised: the interface between the last stage of a step and an objective."""

from __future__ import annotations

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


class Objective(Protocol):
    """Turns token losses into the loss of a micro-batch."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of what is reported beside the loss."""
        ...

    @property
    def shown(self) -> tuple[str, ...]:
        """Those of `metrics` that a line of progress shows."""
        ...

    @property
    def loss_at_chance(self) -> float | None:
        """The loss of a model that has learnt nothing; None where it has no fixed value."""
        ...

    @property
    def compares_with_base(self) -> bool:
        """Whether each micro-batch must go through the model without adapters first; see `reference`."""
        ...

    def reference(self, token_losses_T: Tensor, batch: Batch) -> Tensor:
        """What is kept of a pass without adapters, to be given to `sums`."""
        ...

    def sums(self, token_losses_T: Tensor, batch: Batch, reference: Tensor | None) -> ObjectiveSums:
        """What a micro-batch adds.

        Args:
            token_losses_T: fp32 [T] negative log-likelihoods.
            batch: their labels and weights.
            reference: as `reference` gave it for this batch; None where none was asked for.
        """
        ...
