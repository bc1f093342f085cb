"""The log of operations of this process, sent and awaited. Only hang reports read it.

Every rank of a group goes through the same collectives of an axis in the same order, so their numbers can be compared:
the first one that some ranks have begun and others have not is where they part. Transfers are numbered for each pair
and direction. Noting one costs a dictionary look-up and an append; nothing is asked of a device or of other ranks.

With NCCL a wait does not stop the host, which runs ahead of its device until a queue is full: the operations it has
begun say little. So while a run is watched (`follow`), a mark is left on the device behind each wait, and the thread
that watches asks which of them the device has passed: the device is at the first that it has not. The works
themselves are not kept, because each would keep the tensors that it wrote.

There is one record in a process, as there is one set of connections. No decision depends on it. Operations inside a
CUDA graph are not in it. A channel must not be used by two threads at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from engine.distributed.ranks import spelled_ranks

RECENT = 64
"""Operations of which a report shows the order."""
AHEAD = 16384
"""Marks that are kept at most: more than a host can launch between two looks."""

_Key: TypeAlias = tuple[str, Any, str, int | None]
"""Axis, group, "collective", "send" or "receive", and the peer's place in the group where there is one."""

TRANSFERS = ("send", "receive")


class Mark(Protocol):
    """A place in a device's work, such as a CUDA event."""

    def query(self) -> bool:
        """Returns whether the device has passed it; does not wait."""


def cuda_mark() -> Mark | None:
    """Marks where the current stream stands; None in a capture, which is not carried out."""
    if torch.cuda.is_current_stream_capturing():
        return None
    event = torch.cuda.Event()
    event.record()
    mark: Mark = event
    return mark


@dataclass(frozen=True, kw_only=True, slots=True)
class Noted:
    """One operation, in numbers of the whole run, as other ranks can read it.

    Args:
        axis: on which it runs.
        members: the ranks that take part, in the group's order; for a transfer, the sender and the receiver.
        operation: such as all_reduce.
        number: its place among the operations of the channel, from 1.
        seconds: since it began.
        is_transfer: a send or a receive, which is one operation with two names.
        passed: the last operation of the channel that this rank's device has passed; 0 where devices are not followed.
    """

    axis: str
    members: tuple[int, ...]
    operation: str
    number: int
    seconds: float
    is_transfer: bool = False
    passed: int = 0

    @property
    def channel(self) -> str:
        """The same text on all ranks that take part."""
        if self.is_transfer:
            return f"axis {self.axis} from rank {self.members[0]} to rank {self.members[1]}"
        return f"axis {self.axis} of {spelled_ranks(self.members)}"


class OperationLog:
    """Operations of this process since it began. Any thread may note, any other may read."""

    def __init__(self) -> None:
        self._counts: dict[_Key, tuple[int, str, float]] = {}
        self._recent: deque[tuple[_Key, int, str, float]] = deque(maxlen=RECENT)
        self._waits: dict[int, tuple[_Key, int, str, float]] = {}
        self._mark: Callable[[], Mark | None] | None = None
        self._ahead: deque[tuple[_Key | None, int, str, float, Mark]] = deque(maxlen=AHEAD)
        """Operations that the device is not known to have passed, in its order; without a key for others."""
        self._passed: dict[_Key, int] = {}
        self.total = 0
        """Operations begun, waits ended and marks passed: a hang is where it stays the same."""

    def follow(self, mark: Callable[[], Mark | None] | None) -> None:
        """Follows the device from now on, by the events of `mark`; None stops that."""
        self._mark, self._ahead = mark, deque(maxlen=AHEAD)

    def progressed(self, *, on_device: bool = False) -> None:
        """Notes that this process has made progress other than an operation: a micro-batch, a block of a file.

        Args:
            on_device: once the device has passed the work launched so far, that is progress too.
        """
        self.total += 1
        if on_device:
            self._leave_mark(None, 0, "", time.monotonic())

    def _leave_mark(self, key: _Key | None, number: int, operation: str, since: float) -> None:
        if self._mark is not None and (mark := self._mark()) is not None:
            self._ahead.append((key, number, operation, since, mark))

    def look(self) -> Noted | None:
        """Returns the first operation that the device has not passed. For the thread that watches, and for no other.

        A failed device is no longer followed; the main thread's next call raises its error.
        """
        ahead = self._ahead
        try:
            while ahead and ahead[0][-1].query():
                key, number, *_ = ahead.popleft()
                if key is not None:
                    self._passed[key] = number
                self.total += 1
        except RuntimeError:
            self.follow(None)
            return None
        now = time.monotonic()
        for key, number, operation, since, _ in list(ahead):
            if key is not None:
                return _noted(key, number, operation, since, now)
        return None

    def began(self, operation: str, axis: str, group: Any, peer: int | None = None) -> int:
        """Notes that an operation begins; returns its number on its channel."""
        key = (axis, group, operation if peer is not None else "collective", peer)
        now = time.monotonic()
        number = self._counts.get(key, (0,))[0] + 1
        self._counts[key] = number, operation, now
        self._recent.append((key, number, operation, now))
        self.total += 1
        return number

    def waiting(self, operation: str, axis: str, group: Any, peer: int | None, number: int) -> None:
        """Notes that this thread waits from now on."""
        key = (axis, group, operation if peer is not None else "collective", peer)
        self._waits[threading.get_ident()] = key, number, operation, time.monotonic()

    def wait_ended(self, *, failed: bool = False) -> None:
        """Notes that this thread's wait has ended; with NCCL the device has yet to come to its end."""
        ended = self._waits.pop(threading.get_ident(), None)
        self.total += 1
        if ended is not None and not failed:
            self._leave_mark(*ended)

    @contextmanager
    def blocking(self, operation: str, axis: str, group: Any) -> Iterator[None]:
        """Notes an operation that is begun and waited for in one."""
        self.waiting(operation, axis, group, None, self.began(operation, axis, group))
        try:
            yield
        except BaseException:
            self.wait_ended(failed=True)
            raise
        self.wait_ended()

    def last(self) -> list[Noted]:
        """Returns the last operation of each channel."""
        now = time.monotonic()
        return [_noted(key, *rest, now, passed=self._passed.get(key, 0)) for key, rest in list(self._counts.items())]

    def recent(self) -> list[Noted]:
        """Returns the last operations of all channels, in their order."""
        now = time.monotonic()
        return [_noted(*entry, now) for entry in list(self._recent)]

    def waits(self) -> dict[int, Noted]:
        """Returns the operation that each waiting thread waits for, by the thread's identifier."""
        now = time.monotonic()
        return {thread: _noted(*entry, now) for thread, entry in list(self._waits.items())}


LOG = OperationLog()
"""The operation log of this process."""


def _noted(key: _Key, number: int, operation: str, since: float, now: float, *, passed: int = 0) -> Noted:
    axis, group, kind, peer = key
    ranks = tuple(dist.get_process_group_ranks(group))
    is_transfer = kind in TRANSFERS
    if is_transfer:
        assert peer is not None
        ends = (dist.get_rank(), ranks[peer])
        ranks = ends if kind == "send" else ends[::-1]
    return Noted(
        axis=axis,
        members=ranks,
        operation=operation,
        number=number,
        seconds=now - since,
        is_transfer=is_transfer,
        passed=passed,
    )
