"""Reports each step to the metrics file, the progress line and the listener, and calls the observers of the steps.

The figures of a step are copied to the host behind it, and read when the next step has been handed to the device. The
device does not wait for the host, and the host waits for no more than the step it reports: while the next one runs it
prepares the one after. A step is reported one step late, and the last one of the run when the loop has ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from engine.config.log import LogOptions
from engine.objectives.objective import figures_to_show
from engine.telemetry.listener import RunListener, StepEvent
from engine.telemetry.metrics import MetricsWriter, Value
from engine.telemetry.process_memory import peak_memory_bytes
from engine.telemetry.progress import TrainProgress
from engine.training.build import Training
from engine.training.observer import LaunchedStep, Observer, StepReport
from engine.training.step import StepFigures
from engine.training.step_source import StepSource


class RunClock:
    """The clock of a run: seconds without evaluations, samples and waits for saves."""

    def __init__(self) -> None:
        self._left_out = 0.0

    def now(self) -> float:
        """Returns seconds from an arbitrary origin."""
        return time.monotonic() - self._left_out

    def leave_out(self, seconds: float) -> None:
        """Excludes seconds that have just passed."""
        self._left_out += seconds

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Excludes the time spent inside."""
        begin = time.monotonic()
        yield
        self.leave_out(time.monotonic() - begin)


@dataclass(frozen=True, slots=True)
class _Unread:
    """A step whose figures may still be on the device."""

    step: int
    figures: StepFigures
    lr: float
    consumed: int
    rows: int
    tokens: int
    finished: float
    """When it was handed to the device, on the run's clock."""
    of_rows: Mapping[str, float]
    """The figures of its rows."""


class StepReporter:
    """Reports the steps of one run on this rank. Every rank has a reporter and makes the same calls.

    Args:
        options: the intervals between reports.
        training: of the run.
        source: of the steps.
        clock: of the run.
        metrics, progress, listener: receive the reports.
        observers: follow the steps, in this order.
    """

    def __init__(
        self,
        options: LogOptions,
        training: Training,
        source: StepSource,
        clock: RunClock,
        *,
        metrics: MetricsWriter,
        progress: TrainProgress,
        listener: RunListener,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._every, self._training, self._source, self._clock = options.every, training, source, clock
        self._metrics, self._progress, self._listener = metrics, progress, listener
        self._observers = tuple(observers)
        self._unread: _Unread | None = None
        self._left_out: _Unread | None = None
        """The newest step, where log.every left it out."""
        self._since = clock.now()
        self._rows, self._step_tokens = 0, 0
        """Since the previous report."""
        self._stalled = 0.0
        self._worked: Mapping[str, float] = dict.fromkeys(source.work_seconds, 0.0)
        self.tokens = 0
        """Tokens of the steps that were read in this start."""
        self.losses: list[tuple[int, float]] = []
        """Step and loss of the steps that were reported in this start."""
        self.newest: StepEvent | None = None
        """The newest of them."""

    def begin(self, step: int, consumed: int) -> None:
        """Starts the clock of the first report; see `Observer.begin`."""
        self._since = self._clock.now()
        for observer in self._observers:
            observer.begin(step, consumed)

    def before(self, step: int) -> None:
        """Notes that `step`, counted from 1, is about to be handed to the device."""
        for observer in self._observers:
            observer.before(step)

    def after(self, launched: LaunchedStep, *, rows: int, tokens: int, figures: Mapping[str, float]) -> None:
        """Notes that a step was handed to the device, and reports the previous one.

        Args:
            launched: the step.
            rows, tokens: of its global batch.
            figures: of these rows.

        Raises:
            UserError: a guard's policy stops the run, or a file cannot be written.
        """
        for observer in self._observers:
            observer.after(launched)
        self._read(
            _Unread(
                launched.step,
                launched.figures,
                launched.lr,
                launched.consumed,
                rows,
                tokens,
                self._clock.now(),
                figures,
            ),
            last=False,
        )

    def catch_up(self, *, last: bool = False) -> None:
        """Reports the newest step without waiting for another one, if it is one that log.every reports.

        Args:
            last: no step follows; it is reported whatever log.every says.

        Raises:
            UserError: as `after`.
        """
        self._read(None, last=last)

    def save(self, step: int, *, last: bool) -> None:
        """Reports the newest step before a checkpoint is written; see `catch_up` and `Observer.save`."""
        self.catch_up(last=last)
        for observer in self._observers:
            observer.save(step)

    def finish(self, step: int, consumed: int) -> None:
        """Reports the last step; see `Observer.finish`.

        Raises:
            UserError: as `after`.
        """
        self.catch_up(last=True)
        for observer in self._observers:
            observer.finish(step, consumed)

    def _read(self, newest: _Unread | None, *, last: bool) -> None:
        ready, self._unread = self._unread, newest
        if ready is None:
            if last and self._left_out is not None:
                self._report(self._left_out)
            return
        self.tokens += ready.tokens
        self._step_tokens += ready.tokens
        self._rows += ready.rows
        if ready.step % self._every == 0 or last:
            self._report(ready)
        else:
            self._left_out = ready

    def _report(self, ready: _Unread) -> None:
        self._left_out = None
        loss, norm, loss_scale, metrics = ready.figures.read()
        self.losses.append((ready.step, loss))
        rows, tokens, seconds = self._rows, self._step_tokens, ready.finished - self._since
        self._since, self._rows, self._step_tokens = ready.finished, 0, 0
        memory = peak_memory_bytes()
        named = self._named_figures(metrics, loss_scale)
        report = StepReport(step=ready.step, loss=loss, rows=rows, tokens=tokens, seconds=seconds, memory=memory)
        more: dict[str, Value] = {**named}
        for observer in self._observers:
            more |= observer.figures(report)
        more |= dict(ready.of_rows) | self._working(seconds)
        stalled, self._stalled = self._source.stalled - self._stalled, self._source.stalled
        more["data_stall"] = stalled
        self._metrics.train(
            step=ready.step,
            loss=loss,
            grad_norm=norm,
            lr=ready.lr,
            tokens=tokens,
            seconds=seconds,
            memory=memory,
            **more,
        )
        shown = self._source.shown
        self._progress.update(
            step=ready.step,
            loss=loss,
            grad_norm=norm,
            lr=ready.lr,
            tokens=tokens,
            seconds=seconds,
            memory=memory,
            more={shown[name]: value for name, value in ready.of_rows.items() if name in shown}
            | figures_to_show(self._training.objective, named),
        )
        self.newest = StepEvent(
            step=ready.step,
            samples=ready.consumed,
            loss=loss,
            lr=ready.lr,
            grad_norm=norm,
            tokens=tokens,
            seconds=seconds,
            memory=memory,
            figures=more,
        )
        self._listener.reported(self.newest)
        for observer in self._observers:
            observer.read(report)

    def _working(self, seconds: float) -> dict[str, float]:
        """Returns the seconds of work between steps since the previous report, by name, and the rest, spent on
        training."""
        now = dict(self._source.work_seconds)
        found = {name: total - self._worked[name] for name, total in now.items()}
        self._worked = now
        return found | {"training_seconds": seconds - sum(found.values())} if found else {}

    def _named_figures(self, metrics: list[float], loss_scale: float) -> dict[str, float]:
        """Returns the objective's metrics by name, with the loss scale where there is one."""
        more = dict(self._training.objective.named(metrics))
        if self._training.optimizer.loss_scale is not None:
            more["loss_scale"] = loss_scale
        return more
