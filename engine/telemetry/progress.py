"""Progress of long work, on one line.

On a terminal the line is rewritten in place; elsewhere plain lines are printed, at most about one a second, and
always the last. Only rank 0 shows anything (see `Log`).
"""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from engine.printable import printable
from engine.telemetry.format import format_bytes, format_count, format_duration
from engine.telemetry.log import Log

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

    def show(self, text: str, *, last: bool = False) -> None:
        """Shows `text` if enough time has passed since the previous line; `last` is always shown and ends the line."""
        if not self._log.enabled:
            return
        now = self._clock()
        pause = _LIVE_SECONDS if self._log.live else _PLAIN_SECONDS
        if not last and self._shown_at is not None and now - self._shown_at < pause:
            return
        self._shown_at = now
        if self._log.live:
            width = shutil.get_terminal_size().columns - 1
            self._log.stream.write(f"\r\x1b[K{printable(text)[:width]}" + ("\n" if last else ""))
            self._log.stream.flush()
            self._open = not last
        else:
            self._log.info(text)

    def info(self, message: str) -> None:
        """Prints a separate line without mangling the rewritten one."""
        self.end()
        self._log.info(message)

    def end(self) -> None:
        """Leaves the rewritten line as it is and starts a new one."""
        if self._open:
            self._log.stream.write("\n")
            self._log.stream.flush()
            self._open = False


_SETTLED_SECONDS = 1.0
"""Seconds before an ETA is shown: earlier the speed means little."""


class Progress:
    """Progress of work with a known or unknown number of bytes or items; also a context manager.

    Args:
        log: where the line goes.
        title: what is being done, such as "reading weights".
        total: how much there is to do; None when unknown.
        unit: "bytes", or the plural name of what is counted.
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

    def advance(self, amount: int = 1) -> None:
        """Counts `amount` more as done."""
        self._done += amount
        self._line.show(self.text())

    def finish(self) -> None:
        """Shows the last line; further calls do nothing."""
        if not self._finished:
            self._finished = True
            self._line.show(self.text(), last=True)

    def text(self) -> str:
        """Returns the current line."""
        elapsed = max(self._clock() - self._start, 1e-9)
        rate = self._done / elapsed
        is_bytes = self._unit == "bytes"
        amount = format_bytes if is_bytes else lambda count: f"{count:.0f}"
        done = amount(self._done) if self._total is None else f"{amount(self._done)} / {amount(self._total)}"
        parts = [f"{self._title}: {done}" + ("" if is_bytes else f" {self._unit}")]
        if self._total:
            parts[0] += f" ({100 * self._done / self._total:.0f}%)"
        parts.append(f"{format_bytes(rate)}/s" if is_bytes else f"{format_count(rate)}/s")
        if self._finished or (self._total is not None and self._done >= self._total):
            parts.append(f"took {format_duration(elapsed)}")
        elif self._total is not None and rate > 0 and elapsed >= _SETTLED_SECONDS:
            parts.append(f"ETA {format_duration((self._total - self._done) / rate)}")
        return "  ".join(parts)

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
        self._line = ProgressLine(log, clock)
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
        text = self._text(step, loss, lr, grad_norm, memory, more or {})
        self._line.show(text, last=self._total is not None and step >= self._total)

    def info(self, message: str) -> None:
        """Prints a separate line, such as an evaluation or a checkpoint."""
        self._line.info(message)

    def close(self) -> None:
        """Leaves the line as it is."""
        self._line.end()

    def _text(self, step: int, loss: float, lr: float, grad_norm: float, memory: int, more: Mapping[str, float]) -> str:
        seconds = sum(entry[0] for entry in self._recent)
        tokens = sum(entry[1] for entry in self._recent)
        steps = sum(entry[2] for entry in self._recent)
        parts = [
            f"step {step}" if self._total is None else f"step {step}/{self._total}",
            f"loss {loss:.4f}",
            *(f"{name} {value:.3g}" for name, value in more.items()),
            f"lr {lr:.3g}",
            f"grad norm {grad_norm:.3g}",
        ]
        if seconds > 0:
            parts.append(f"{format_count(tokens / seconds)} tokens/s")
        parts.append(f"mem {format_bytes(memory)}")
        if self._total is not None and steps > 0:
            parts.append(f"ETA {format_duration((self._total - step) * seconds / steps)}")
        return "  ".join(parts)
