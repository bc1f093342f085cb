"""The interface by which a run reports its events, and by which it is stopped: by a program or a benchmark's log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

RunStatus = Literal["target", "end", "stopped"]
"""Why a run stopped: its target was reached, it took its last step, or it was stopped before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEvent:
    """A training step that is reported, with everything that its record in metrics.jsonl has.

    Args:
        step: its number, from 1.
        samples: of training data consumed up to and with it.
        loss: mean over the targets of its global batch, before the update.
        lr: learning rate of the update.
        grad_norm: norm of all gradients before clipping.
        tokens: of the global batches of the steps since the report before.
        seconds: wall time of these steps, without evaluations, samples and waits for saves.
        memory: peak bytes held so far by this rank.
        figures: the further figures by their names in metrics.jsonl: those of the objective, such as
            "rewards/accuracies"; of completions, such as "reward" and "completions/mean_length"; of guards and data.
    """

    step: int
    samples: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    seconds: float
    memory: int
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """The speed of these steps over all ranks."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationEvent:
    """An evaluation of the validation data.

    Args:
        step: steps taken before it.
        samples: of training data consumed.
        loss: mean over the targets of the validation data; NaN where completions of its prompts are sampled.
        seconds: wall time.
        figures: the objective's further figures by name, or those of the completions.
    """

    step: int
    samples: int
    loss: float
    seconds: float
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class TasksEvent:
    """An evaluation of the tasks of lm-evaluation-harness that evaluation.tasks names.

    Args:
        step: steps taken before it.
        samples: of training data consumed.
        seconds: wall time.
        figures: by TASK/METRIC, such as "arc_easy/acc_norm".
    """

    step: int
    samples: int
    seconds: float
    figures: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointEvent:
    """A checkpoint that is complete.

    Args:
        step: steps taken before it.
        path: its folder.
        num_bytes: of its files.
        seconds: from its beginning until it was complete.
        pause: seconds for which training waited.
    """

    step: int
    path: Path
    num_bytes: int
    seconds: float
    pause: float


class RunListener:
    """Hears of a run's events; subclasses override the methods of those that they handle.

    All ranks call it at the same places, and the time it takes is the run's. A block is the training between two
    evaluations. `samples` are always the samples of training data consumed so far. Its `stop` ends the run it hears of,
    wherever that is called.
    """

    wants_stop = False
    """Whether `stop` was called since the last run ended."""

    def stop(self) -> None:
        """Asks the run to stop: it finishes the step under way, saves and returns, with `stopped` set to "stop()".

        From a method of the listener, another thread, or a signal's handler; under torchrun it is enough on one rank.
        Asked before the run begins, it stops before the first step.
        """
        self.wants_stop = True

    def run_started(self) -> None:
        """Called when model and optimizer are built and warm. With train.synthetic_steps no data has been read yet."""

    def data_read(self, *, train_samples: int, eval_samples: int, total_steps: int, accumulation: int) -> None:
        """Called when the data are read and the steps planned.

        Args:
            train_samples: rows of the training data.
            eval_samples: rows of the validation data; 0 for none.
            total_steps: of the whole run, at most.
            accumulation: micro-batches of a step on each rank.
        """

    def block_started(self, samples: int) -> None:
        """Called when training starts or continues.

        Args:
            samples: of training data consumed so far.
        """

    def block_stopped(self, samples: int) -> None:
        """Called when training pauses or has ended.

        Args:
            samples: of training data consumed so far.
        """

    def reported(self, event: StepEvent) -> None:
        """Called for each step that log.every chooses, one step late: the next one is computed meanwhile.

        Args:
            event: the step.
        """

    def evaluated(self, event: EvaluationEvent) -> None:
        """Called after an evaluation.

        Args:
            event: the same on all ranks.
        """

    def tasks_evaluated(self, event: TasksEvent) -> None:
        """Called after an evaluation of tasks.

        Args:
            event: the same on all ranks.
        """

    def saved(self, event: CheckpointEvent) -> None:
        """Called on rank 0 when a checkpoint is complete, between later steps where it is written beside training.

        Args:
            event: the checkpoint.
        """

    def run_stopped(self, samples: int, status: RunStatus) -> None:
        """Called when training has ended, before the last save; not where an error ends the run.

        Args:
            samples: of training data consumed.
            status: why it has ended.
        """
