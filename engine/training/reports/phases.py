"""Times the phases of a step by the device's own clock, without waiting for it.

On a GPU an event is recorded where a phase ends, and read when a later step asks and it has passed. On a CPU the host's
clock is the device's. A step that is captured or replayed as a graph has no phases.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import pairwise
from typing import TypeAlias

import torch

_Moment: TypeAlias = float | torch.cuda.Event


class PhaseClock:
    """Times the phases of one rank's steps.

    Args:
        device: of the step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: list[tuple[str, _Moment]] | None = None
        self._closed: deque[list[tuple[str, _Moment]]] = deque()
        self._totals: dict[str, float] = {}

    def begin(self) -> None:
        """Begins a step."""
        moment = self._moment()
        self._open = None if moment is None else [("", moment)]

    def passed(self, phase: str, *, last: bool = False) -> None:
        """Ends `phase`, and with the `last` one the step; outside of a step nothing is noted."""
        if self._open is None:
            return
        moment = self._moment()
        if moment is None:
            self._open = None
            return
        self._open.append((phase, moment))
        if last:
            self._closed.append(self._open)
            self._open = None
            self._read()

    def totals(self) -> dict[str, float]:
        """Returns the seconds of each phase, over the steps that have ended since the last call."""
        self._read()
        found, self._totals = self._totals, {}
        return found

    def _moment(self) -> _Moment | None:
        if self._device.type != "cuda":
            return time.perf_counter()
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _read(self) -> None:
        while self._closed and _over(self._closed[0][-1][1]):
            marks = self._closed.popleft()
            for (_, start), (phase, end) in pairwise(marks):
                self._totals[phase] = self._totals.get(phase, 0.0) + _between(start, end)


def _over(moment: _Moment) -> bool:
    return isinstance(moment, float) or moment.query()


def _between(start: _Moment, end: _Moment) -> float:
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert not isinstance(end, float)
    return float(start.elapsed_time(end)) / 1000
