"""Measures the bytes and seconds of collectives, without waiting for any rank or device.

A GPU's own clock is read by events: one before the collective on the stream that launches it, one behind it on a side
stream of the axis. They are looked at when totals are asked for; those that are not yet done are left for the next
call. The side stream's wait is the first one for the collective, and torch keeps a collective's tensors alive until
then. The computing stream, to which their memory belongs, waits later: until its own wait the meter holds them. With
Gloo the host's clock is read when a collective begins and when its wait returns; one that was over before its caller
waited for it ended at an unknown moment, and counts with its bytes, but not in the bandwidth.

A time begins when this rank begins, so waiting for the slowest rank is in it. Bytes are those that one rank sends with
a ring: 2 (n-1)/n of the tensor for an all-reduce, (n-1)/n of the whole for all-gather, reduce-scatter and all-to-all,
all of it for a transfer. Transfers of a replayed graph are not seen.

There is one meter in a process, as there is one set of connections, and it is off until it is started.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor


@dataclass(slots=True)
class Moved:
    """The transfers since the totals were last taken.

    Args:
        calls, sent: collectives that were begun and bytes that this rank sent with them.
        timed, seconds: bytes of those whose end is known, and their time; bandwidth is the one over the other.
    """

    calls: int = 0
    sent: float = 0.0
    timed: float = 0.0
    seconds: float = 0.0


_Moment: TypeAlias = float | torch.cuda.Event


class TransferMeter:
    """Measures the transfers of this process. Not thread-safe."""

    def __init__(self) -> None:
        self.on = False
        self._moved: dict[str, Moved] = {}
        self._open: deque[tuple[str, float, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._streams: dict[str, torch.cuda.Stream] = {}

    def start(self) -> None:
        """Measures from now on."""
        self.on = True
        self._moved.clear()
        self._open.clear()

    def stop(self) -> None:
        """Measures no longer."""
        self.on = False

    def moment(self, tensors: Any) -> _Moment | None:
        """Notes when a collective begins that moves one of `tensors`; None where nothing is measured."""
        if not self.on:
            return None
        first = next((one for one in tensors if isinstance(one, Tensor)), None)
        if first is None or first.device.type != "cuda":
            return time.perf_counter()
        if torch.cuda.is_current_stream_capturing():
            return None
        return _event(torch.cuda.current_stream(first.device))

    def watched(self, work: Any, begun: _Moment | None, name: str, sent: float, tensors: Sequence[Any]) -> Any:
        """Returns `work`, or something measured that can be waited for like it.

        Args:
            work: of torch.distributed.
            begun: a result of `moment`.
            name: axis and operation.
            sent: bytes that this rank sends.
            tensors: all that the collective reads and writes; other objects are skipped.
        """
        if begun is None:
            return work
        moved = self._moved.setdefault(name, Moved())
        moved.calls += 1
        moved.sent += sent
        if isinstance(begun, float):
            return _Watched(work, begun, moved, sent)
        stream = self._stream(name.partition(" ")[0])
        with torch.cuda.stream(stream):
            work.wait()
        self._open.append((name, sent, begun, _event(stream)))
        return _Held(work, [one for one in tensors if isinstance(one, Tensor)])

    def _stream(self, axis: str) -> torch.cuda.Stream:
        """Returns the stream of one axis: work on it ends in order, and does not wait for that of other axes."""
        if axis not in self._streams:
            self._streams[axis] = torch.cuda.Stream()
        return self._streams[axis]

    def totals(self) -> dict[str, Moved]:
        """Returns the transfers since the last call, by axis and operation."""
        waiting: deque[tuple[str, float, torch.cuda.Event, torch.cuda.Event]] = deque()
        for name, sent, begun, ended in self._open:
            if not ended.query():
                waiting.append((name, sent, begun, ended))
                continue
            moved = self._moved.setdefault(name, Moved())
            moved.timed += sent
            moved.seconds += begun.elapsed_time(ended) / 1000
        found, self._moved, self._open = self._moved, {}, waiting
        return found


class _Watched:
    """Work whose end is noted by the wait for it."""

    __slots__ = ("_begun", "_moved", "_sent", "_work")

    def __init__(self, work: Any, begun: float, moved: Moved, sent: float) -> None:
        self._work, self._begun, self._moved, self._sent = work, begun, moved, sent

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> Any:
        over = self._work.is_completed()
        result = self._work.wait()
        if not over:
            self._moved.timed += self._sent
            self._moved.seconds += time.perf_counter() - self._begun
        return result


class _Held:
    """Work whose tensors live until the stream that computes has waited for it."""

    __slots__ = ("_tensors", "_work")

    def __init__(self, work: Any, tensors: list[Tensor]) -> None:
        self._work, self._tensors = work, tensors

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> Any:
        result = self._work.wait()
        self._tensors.clear()
        return result


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def sent_bytes(operation: str, tensors: Any, size: int) -> float:
    """Counts the bytes that a rank sends in a collective over `size` ranks; the largest of `tensors` is the whole."""
    whole = max((one.numel() * one.element_size() for one in tensors if isinstance(one, Tensor)), default=0)
    return whole * (size - 1) / size * (2 if operation == "all_reduce" else 1)


METER = TransferMeter()
"""The meter of this process."""
