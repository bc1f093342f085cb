"""The evaluations of a run: their steps, their records, the best one, and whether one ends the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, Protocol

from engine.config.run import RunConfig
from engine.errors import UserError
from engine.sentences import listed
from engine.telemetry.format import format_duration
from engine.telemetry.listener import EvaluationEvent, TasksEvent
from engine.telemetry.metrics import MetricsWriter
from engine.training.evaluate import Validation, is_due

Ending = Literal["target", "patience"]
"""The option by which an evaluation ends a run: train.target_eval_loss, or train.early_stopping_patience."""


class TaskFigure(NamedTuple):
    """A figure of a task: its value, and whether higher is better, None where the task does not say."""

    value: float
    higher: bool | None


class TaskEvaluation(Protocol):
    """The seam of tasks that score a run's model; evaluation.tasks names them."""

    def run(self, check: Callable[[], None]) -> Mapping[str, TaskFigure]:
        """Returns the figures of the current model by TASK/METRIC, the same on all ranks. Collective.

        Args:
            check: called at places that all ranks pass in the same order; may leave the evaluation with an exception.

        Raises:
            UserError: a task cannot be evaluated.
        """
        ...


@dataclass(slots=True)
class BestLoss:
    """The outcome of the evaluations so far, part of a checkpoint's state.

    Args:
        loss: the lowest loss, or the lowest negated figure where completions are sampled.
        step: after which it was found; -1 before the first evaluation.
        last: the newest.
        seen: step of the newest evaluation; -1 before the first.
        misses: evaluations in a row whose loss was not lower than `mark` by the margin that counts.
        mark: the loss that they are compared with.
        score: the highest figure of checkpoint.best, negated where lower is better; -infinity before the first.
        score_step: after which it was found; -1 before the first.
        scored: step of the newest evaluation of tasks; -1 before the first.
    """

    loss: float = float("inf")
    step: int = -1
    last: float = float("inf")
    seen: int = -1
    misses: int = 0
    mark: float = float("inf")
    score: float = float("-inf")
    score_step: int = -1
    scored: int = -1

    def take(self, step: int, loss: float, *, min_delta: float) -> bool:
        """Counts an evaluation, and returns whether it is the best so far. An evaluation is counted only once."""
        if step <= self.seen:
            return False
        self.seen, self.last = step, loss if loss == loss else float("inf")  # JSON has no NaN
        if loss < self.mark - min_delta:
            self.mark, self.misses = loss, 0
        else:  # NaN is no improvement either
            self.misses += 1
        if not loss < self.loss:
            return False
        self.loss, self.step = loss, step
        return True

    def take_score(self, step: int, score: float | None) -> None:
        """Counts an evaluation of tasks, once.

        Args:
            score: the figure of checkpoint.best, negated where lower is better; None where that is the loss.
        """
        if step <= self.scored:
            return
        self.scored = step
        if score is not None and score > self.score:
            self.score, self.score_step = score, step

    def kept(self, *, by_loss: bool) -> tuple[int, float]:
        """Returns the step of the best checkpoint, -1 for none, and its figure.

        Args:
            by_loss: whether the loss decides, or the score.
        """
        return (self.step, self.loss) if by_loss else (self.score_step, self.score)

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint: numbers that JSON has; empty before the first evaluation."""
        finite = {key: value for key, value in asdict(self).items() if abs(value) < float("inf")}
        if self.scored < 0:
            del finite["score_step"], finite["scored"]
        return finite if self.seen >= 0 or self.scored >= 0 else {}

    @classmethod
    def of_state(cls, state: dict[str, Any] | None) -> BestLoss:
        """Restores a saved state; checkpoints that were saved before an evaluation have none."""
        return cls(**(state or {}))


class Evaluations:
    """The evaluations of one run. Collective: every rank makes the same calls.

    Args:
        config: of the run.
        validation: the validation data; None evaluates nothing.
        metrics: gets a record of each evaluation.
        say: prints a line on rank 0.
        best: outcome of earlier evaluations.
        tasks: that score the model; None for none.
    """

    def __init__(
        self,
        config: RunConfig,
        validation: Validation | None,
        *,
        metrics: MetricsWriter,
        say: Callable[[str], None],
        best: BestLoss,
        tasks: TaskEvaluation | None = None,
    ) -> None:
        self._tasks, self._every, self._judge = tasks, config.evaluation.every, config.checkpoint.best
        self._by_validation = config.checkpoint.judges_by_validation
        self._options, self._validation, self._figure = config.train, validation, config.evaluated_figure
        self._metrics, self._say = metrics, say
        self.best = best
        self.losses: list[tuple[int, float]] = []
        """Step and loss, or the figure that takes its place, of this start's evaluations."""

    def is_due(self, step: int, *, ends: bool = False) -> bool:
        """Returns whether the validation data or the tasks are evaluated after `step` steps, and have not been; `ends`:
        no step follows."""
        return self.loss_is_due(step, ends=ends) or self.tasks_are_due(step, ends=ends)

    def loss_is_due(self, step: int, *, ends: bool = False) -> bool:
        """Returns `is_due` of the validation data."""
        return self._validation is not None and self.best.seen != step and is_due(self._options, step, ends=ends)

    def tasks_are_due(self, step: int, *, ends: bool = False) -> bool:
        """Returns `is_due` of the tasks."""
        in_turn = step == 0 or ends or (self._every > 0 and step % self._every == 0)
        return self._tasks is not None and self.best.scored != step and in_turn

    @property
    def kept(self) -> tuple[int, float]:
        """The step of the best checkpoint so far, -1 for none, and its figure."""
        return self.best.kept(by_loss=self._by_validation)

    @property
    def ending(self) -> Ending | None:
        """The reason why the newest evaluation ends the run; None where it does not."""
        return ending(self.best, target=self._options.target_eval_loss, patience=self._options.early_stopping_patience)

    def count(self, found: EvaluationEvent) -> None:
        """Counts an evaluation as one of the run's own, which decide when it ends and which checkpoint is the best."""
        step, figure = found.step, self._figure
        value = found.loss if figure is None else found.figures[figure]
        self.best.take(step, value if figure is None else -value, min_delta=self._options.early_stopping_min_delta)
        self.losses.append((step, value))
        if self.ending == "patience":
            mark = self.best.mark if figure is None else -self.best.mark
            moved = "the evaluation loss has not come below" if figure is None else f"{figure} has not risen above"
            self._say(
                f"step {step}: {moved} {mark:.4f} for {self.best.misses} evaluations: early stopping "
                "(train.early_stopping_patience)"
            )

    def run_tasks(self, step: int, consumed: int, check: Callable[[], None]) -> TasksEvent:
        """Evaluates the tasks, writes and says the outcome, and counts it.

        Args:
            step, consumed, check: as for `run`.

        Raises:
            UserError: a task cannot be evaluated, or lacks the figure of checkpoint.best.
        """
        assert self._tasks is not None
        began = time.monotonic()
        found = self._tasks.run(check)
        seconds = time.monotonic() - began
        figures = {name: one.value for name, one in found.items()}
        score = None if self._by_validation else _score(found, self._judge)
        self.best.take_score(step, score)
        self._metrics.tasks(step=step, figures=figures, score=score, seconds=seconds)
        shown = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        self._say(f"step {step}: {shown} ({format_duration(seconds)})")
        return TasksEvent(step=step, samples=consumed, seconds=seconds, figures=figures)

    def run(self, step: int, consumed: int, check: Callable[[], None]) -> EvaluationEvent:
        """Evaluates the validation data, and writes and says the outcome.

        Args:
            step, consumed: steps taken, and samples of training data.
            check: called between groups of micro-batches; may leave the evaluation with an exception.
        """
        assert self._validation is not None
        began = time.monotonic()
        found = self._validation.run(step, check)
        seconds = time.monotonic() - began
        if self._figure is None:
            self._metrics.evaluation(step=step, eval_loss=found.loss, seconds=seconds, **found.figures)
        else:
            self._metrics.completions(step=step, figures=found.figures, seconds=seconds)
        self._say(f"step {step}: {found.shown} ({format_duration(seconds)})")
        return EvaluationEvent(step=step, samples=consumed, loss=found.loss, seconds=seconds, figures=found.figures)


def _score(figures: Mapping[str, TaskFigure], name: str) -> float:
    """Returns the figure of checkpoint.best, negated where lower is better.

    Raises:
        UserError: there is no such figure, or it has no direction.
    """
    if name not in figures:
        raise UserError(
            f"checkpoint.best is {name}, but evaluation.tasks give {listed(figures)}: set checkpoint.best to one of "
            "these, or to loss."
        )
    value, higher = figures[name]
    if higher is None:
        raise UserError(
            f"checkpoint.best is {name}, of which the task does not say whether higher is better: add higher_is_better "
            "to its metric_list, or set checkpoint.best to another figure."
        )
    return value if higher else -value


def ending(best: BestLoss, *, target: float | None, patience: int | None) -> Ending | None:
    """Returns the reason why a run ends after its evaluations so far; None where it continues."""
    if target is not None and best.last <= target:
        return "target"
    return "patience" if patience is not None and best.misses >= patience else None
