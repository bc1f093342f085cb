"""What a run tells whoever wants to know when things happen: a benchmark's log, a scheduler, a test.

It only hears. All ranks call it at the same places; what it does there costs the run time.
"""

from __future__ import annotations

from typing import Literal

RunStatus = Literal["target", "end", "stopped"]
"""How a run stopped: its target was reached, it came to its last step, or a scheduler wanted it to stop."""


class RunListener:
    """Hears nothing; subclasses override what they want to hear.

    A block is the training between two evaluations. `samples` are always the samples of training data consumed so far.
    """

    def run_started(self) -> None:
        """Model and optimizer are built and warm. With train.synthetic_steps no data has been read yet."""

    def data_read(self, *, train_samples: int, eval_samples: int, total_steps: int, accumulation: int) -> None:
        """Rows of the training and the validation data (0 for none), steps at most, and micro-batches of a step."""

    def block_started(self, samples: int) -> None:
        """Training begins or goes on."""

    def block_stopped(self, samples: int) -> None:
        """Training stands still, or has ended."""

    def reported(self, samples: int, *, loss: float, lr: float) -> None:
        """Loss and learning rate of a step, after which so many samples are consumed, have been read."""

    def evaluated(self, samples: int, loss: float) -> None:
        """The validation data has been evaluated; the loss is the same on all ranks."""

    def run_stopped(self, samples: int, status: RunStatus) -> None:
        """Training has ended; what follows is saving. Not called where an error ends the run."""
