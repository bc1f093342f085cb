"""The interface of everything that follows a run's steps: guards, telemetry, forecasts, the load of experts.

The reporter (`engine.training.reports.step_reporter`) calls it, on every rank in the same order; the loop and the step
know none by name. The order of a step is `before`, the launch, `after`, and one step later, when its figures have
reached the host, `figures` and `read`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.batch import Batch
from engine.telemetry.metrics import Value
from engine.training.guards.spikes import NO_LIMIT
from engine.training.step import StepFigures, StepResult


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that was handed to the device.

    Args:
        step: its number, from 1.
        batches: this rank's micro-batches.
        targets: sum of the loss weights over the global batch.
        lr: learning rate.
        consumed: the data cursor after it.
        result: its figures, on the device.
        figures: the same on their way to the host.
        has_signal: whether a gradient is to be expected; False where all completions of each prompt were equally good.
        loss_limit, norm_limit: above these the device left its update out.
    """

    step: int
    batches: list[Batch]
    targets: float
    lr: float
    consumed: int
    result: StepResult
    figures: StepFigures
    has_signal: bool = True
    loss_limit: float = NO_LIMIT
    norm_limit: float = NO_LIMIT


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """A step whose figures are on the host.

    Args:
        step: its number, from 1.
        loss: mean over the targets of its global batch.
        rows, tokens, seconds: since the report before.
        memory: peak so far, in bytes.
    """

    step: int
    loss: float
    rows: int
    tokens: int
    seconds: float
    memory: int


class Observer:
    """Follows the steps of a run on one rank. Every rank has the same observers; each method ignores its call unless a
    class overrides it, and may raise UserError, which ends the run."""

    def begin(self, step: int, consumed: int) -> None:
        """Called before the loop; may wait for the device.

        Args:
            step: steps taken so far.
            consumed: the data cursor.
        """

    def before(self, step: int) -> None:
        """Called when `step`, counted from 1, is about to be handed to the device."""

    def after(self, launched: LaunchedStep) -> None:
        """Called when a step was handed to the device. May launch work; waits for nothing."""

    def figures(self, report: StepReport) -> Mapping[str, Value]:
        """Returns further figures of a step that is reported, for the metrics file."""
        return {}

    def read(self, report: StepReport) -> None:
        """Called when a step has been reported, to judge its figures."""

    def save(self, step: int) -> None:
        """Called before a checkpoint is written, after `step` steps; may wait for the device."""

    def finish(self, step: int, consumed: int) -> None:
        """Called after the last step, when all are reported; may wait for the device. Arguments as for `begin`."""
