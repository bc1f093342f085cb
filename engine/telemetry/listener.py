"""The interface by which a run reports its events to others: a benchmark's log, a scheduler, a test.

It only listens. All ranks call it at the same places; the time it takes is the run's.
"""

from __future__ import annotations

from typing import Literal

RunStatus = Literal["target", "end", "stopped"]
"""Why a run stopped: its target was reached, it took its last step, or a scheduler stopped it."""


class RunListener:
    """A listener that ignores all events; subclasses override those that they handle.

    A block is the training between two evaluations. `samples` are always the samples of training data consumed so far.
    """

    def run_started(self) -> None:
        """Called when model and optimizer are built and warm. With train.synthetic_steps no data has been read yet."""

    def data_read(self, *, train_samples: int, eval_samples: int, total_steps: int, accumulation: int) -> None:
        """Takes rows of the training and the validation data (0 for none), maximum steps, and micro-batches per
        step.
        """

    def block_started(self, samples: int) -> None:
        """Called when training starts or continues."""

    def block_stopped(self, samples: int) -> None:
        """Called when training pauses or has ended."""

    def reported(self, samples: int, *, loss: float, lr: float) -> None:
        """Takes loss and learning rate of a step, and the samples consumed after it."""

    def evaluated(self, samples: int, loss: float) -> None:
        """Takes the loss of an evaluation, which is the same on all ranks."""

    def run_stopped(self, samples: int, status: RunStatus) -> None:
        """Called when training has ended, before the last save. Not called where an error ends the run."""
