"""The evaluations of a run: their steps, their records, and whether one ends the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from engine.config.run import RunConfig
from engine.data.loader import EvalLoader
from engine.objectives.objective import Objective, figures_to_show
from engine.telemetry.format import format_duration
from engine.telemetry.metrics import MetricsWriter
from engine.training.best import BestLoss
from engine.training.build import Training
from engine.training.evaluate import evaluate, is_due

Ending = Literal["target", "patience"]
"""The option by which an evaluation ends a run: train.target_eval_loss, or train.early_stopping_patience."""


class Evaluations:
    """The evaluations of one run. Collective: every rank makes the same calls.

    Args:
        config, training: of the run.
        loader: the validation data; None evaluates nothing.
        metrics: gets a record of each evaluation.
        say: prints a line on rank 0.
        best: outcome of earlier evaluations.
    """

    def __init__(
        self,
        config: RunConfig,
        training: Training,
        loader: EvalLoader | None,
        *,
        metrics: MetricsWriter,
        say: Callable[[str], None],
        best: BestLoss,
    ) -> None:
        self._options, self._training, self._loader = config.train, training, loader
        self._metrics, self._say = metrics, say
        self.best = best
        self.losses: list[tuple[int, float]] = []
        """Step and loss of this start's evaluations."""

    def is_due(self, step: int, *, ends: bool = False) -> bool:
        """Returns whether the validation data is evaluated after `step` steps, and has not been; `ends`: no step
        follows."""
        return self._loader is not None and self.best.seen != step and is_due(self._options, step, ends=ends)

    @property
    def ending(self) -> Ending | None:
        """The reason why the newest evaluation ends the run; None where it does not."""
        return ending(self.best, target=self._options.target_eval_loss, patience=self._options.early_stopping_patience)

    def run(self, step: int, check: Callable[[], None]) -> float:
        """Evaluates.

        Args:
            step: steps taken.
            check: called between groups of micro-batches; may leave the evaluation with an exception.

        Returns:
            The seconds it took.
        """
        assert self._loader is not None
        training, began = self._training, time.monotonic()
        loss, *metrics = evaluate(training.stages, self._loader, training.mesh, progress=lambda _: check())
        seconds = time.monotonic() - began
        more = training.objective.named(metrics)
        self.best.take(step, loss, min_delta=self._options.early_stopping_min_delta)
        self.losses.append((step, loss))
        self._metrics.evaluation(step=step, eval_loss=loss, seconds=seconds, **more)
        shown = _format_metrics(training.objective, more)
        self._say(f"step {step}: evaluation loss {loss:.4f}{shown} ({format_duration(seconds)})")
        if self.ending == "patience":
            self._say(
                f"step {step}: the evaluation loss has not come below {self.best.mark:.4f} for {self.best.misses} "
                "evaluations: early stopping (train.early_stopping_patience)"
            )
        return seconds


def ending(best: BestLoss, *, target: float | None, patience: int | None) -> Ending | None:
    """Returns the reason why a run ends after its evaluations so far; None where it continues."""
    if target is not None and best.last <= target:
        return "target"
    return "patience" if patience is not None and best.misses >= patience else None


def _format_metrics(objective: Objective, more: dict[str, float]) -> str:
    text = "".join(f", {name} {value:.4g}" for name, value in figures_to_show(objective, more).items())
    return f"{text} (the model still equals its reference)" if more.get("margin") == 0 else text
