"""Progress of long work, on one line.

On a terminal the line is rewritten in place, with a bar, and fits the terminal's width; elsewhere plain lines are
printed, at most about one a second, and always the last. Only rank 0 shows anything (see `Log`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from engine.printable import printable
from engine.telemetry.format import format_bytes, format_count, format_duration
from engine.telemetry.log import Log
from engine.telemetry.terminal import StatusLine, leave_bottom, show_at_bottom

_LIVE_SECONDS = 0.1
_PLAIN_SECONDS = 1.0
_RATE_WINDOW = 20


class ProgressLine:
    """A line that is rewritten on a terminal and repeated, rate-limited, elsewhere.

    Args:
        log: where the line goes.
        clock: seconds from any origin; a test may hand in its own.
    """

    def __init__(self, log: Log, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._shown_at: float | None = None
        self._open = False

    def show(self, plain: str, status: StatusLine, *, last: bool = False) -> None:
        """Shows a line if enough time has passed since the previous one; `last` is always shown and ends the line.

        Args:
            plain: where there is no terminal.
            status: the same on a terminal.
        """
        if not self._log.enabled:
            return
        now = self._clock()
        pause = _LIVE_SECONDS if self._log.live else _PLAIN_SECONDS
        if not last and self._shown_at is not None and now - self._shown_at < pause:
            return
        self._shown_at = now
        if not self._log.live:
            self._log.info(plain)
            return
        show_at_bottom(status, self._log.stream)
        self._open = True
        if last:
            self.end()

    def end(self) -> None:
        """Leaves the rewritten line as it is and starts a new one."""
        if self._open:
            leave_bottom()
            self._open = False


_SETTLED_SECONDS = 1.0
"""Seconds before an ETA is shown: earlier the speed means little."""


class Progress:
    """Progress of work with a known or unknown number of bytes or items; also a context manager.

    Args:
        log: where the line goes.
        title: the work, such as "reading weights".
        total: the amount of work; None when unknown.
        unit: "bytes", or the plural name of the items counted.
        clock: as in `ProgressLine`.
    """

    def __init__(
        self,
        log: Log,
        title: str,
        total: int | None = None,
        unit: str = "items",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._line = ProgressLine(log, clock)
        self._title, self._total, self._unit = title, total, unit
        self._clock = clock
        self._start = clock()
        self._done = 0
        self._finished = False

    def expect(self, total: int) -> None:
        """Sets the amount of work, where it is known only after the start."""
        self._total = total

    def advance(self, amount: int = 1) -> None:
        """Counts `amount` more as done."""
        self._done += amount
        self._line.show(self.text(), self._status())

    def finish(self) -> None:
        """Shows the last line; further calls do nothing."""
        if not self._finished:
            self._finished = True
            self._line.show(self.text(), self._status(), last=True)

    def text(self) -> str:
        """Returns the current line where there is no terminal."""
        share = f" ({100 * self._done / self._total:.0f}%)" if self._total else ""
        return "  ".join((f"{self._title}: {self._counted()}{share}", *self._figures()))

    def _status(self) -> StatusLine:
        rate, *seconds = self._figures()
        if self._finished:
            return StatusLine(head=printable(self._title), fields=(self._counted(), rate, *seconds))
        fraction = min(1.0, self._done / self._total) if self._total else None
        return StatusLine(head=printable(self._title), fraction=fraction, fields=(*seconds, self._counted(), rate))

    def _counted(self) -> str:
        if self._unit == "bytes":
            return " / ".join(map(format_bytes, [self._done] + ([] if self._total is None else [self._total])))
        if self._total is not None:
            return f"{self._done} / {self._total} {self._unit}"
        return f"{self._done} {self._unit.removesuffix('s') if self._done == 1 else self._unit}"

    def _figures(self) -> list[str]:
        """Returns the rate, and the time that is left or that it took where that is known."""
        elapsed = max(self._clock() - self._start, 1e-9)
        rate = self._done / elapsed
        found = [f"{format_bytes(rate)}/s" if self._unit == "bytes" else f"{format_count(rate)}/s"]
        if self._finished or (self._total is not None and self._done >= self._total):
            found.append(f"took {format_duration(elapsed)}")
        elif self._total is not None and rate > 0 and elapsed >= _SETTLED_SECONDS:
            found.append(f"ETA {format_duration((self._total - self._done) / rate)}")
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self._line.end()


class TrainProgress:
    """The live line of a training run: step, loss, learning rate, gradient norm, tokens/s, memory, time left.

    Args:
        log: where the line goes.
        total_steps: steps of the whole run; None when unknown.
        start_step: steps already taken, where a run resumes from a checkpoint.
        clock: as in `ProgressLine`.
    """

    def __init__(
        self,
        log: Log,
        total_steps: int | None,
        start_step: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log, self._line = log, ProgressLine(log, clock)
        self._total = total_steps
        self._recent: deque[tuple[float, int, int]] = deque(maxlen=_RATE_WINDOW)
        self._step = start_step

    def update(
        self,
        *,
        step: int,
        loss: float,
        lr: float,
        grad_norm: float,
        tokens: int,
        seconds: float,
        memory: int,
        more: Mapping[str, float] | None = None,
    ) -> None:
        """Shows the state after `step`.

        Args:
            step: steps taken, from 1.
            loss: mean loss of the step.
            lr: learning rate of the step.
            grad_norm: norm of the gradients before clipping.
            tokens: tokens since the previous report.
            seconds: wall time since the previous report.
            memory: peak bytes held so far.
            more: further figures to show, by name.
        """
        self._recent.append((seconds, tokens, step - self._step))
        self._step = step
        spent = sum(entry[0] for entry in self._recent)
        tokens, steps = sum(entry[1] for entry in self._recent), sum(entry[2] for entry in self._recent)
        head = f"step {step}" if self._total is None else f"step {step}/{self._total}"
        shown = [f"loss {loss:.4f}", *(f"{name} {value:.3g}" for name, value in (more or {}).items())]
        speed = [f"{format_count(tokens / spent)} tokens/s"] if spent > 0 else []
        rate, norm, held = f"lr {lr:.3g}", f"norm {grad_norm:.3g}", f"mem {format_bytes(memory)}"
        left, ends = [], self._total is not None and step >= self._total
        if self._total is not None and steps > 0:
            left = [f"ETA {format_duration((self._total - step) * spent / steps)}"]
        fraction = None if self._total is None else min(1.0, step / self._total)
        self._line.show(
            "  ".join((head, *shown, rate, f"grad {norm}", *speed, held, *left)),
            StatusLine(head=head, fraction=fraction, fields=[*left[ends:], *shown, *speed, norm, rate, held]),
            last=ends,
        )

    def info(self, message: str) -> None:
        """Prints a separate line, such as an evaluation or a checkpoint."""
        self._log.info(message)

    def close(self) -> None:
        """Leaves the line as it is."""
        self._line.end()
