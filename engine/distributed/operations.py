"""The log of operations of this process: what it has sent and what it waits for. Only hang reports read it.

Every rank of a group goes through the same collectives of an axis in the same order, so their numbers can be compared:
the first one that some ranks have begun and others have not is where they part. Transfers are numbered for each pair
and direction. Noting one costs a dictionary look-up and an append; nothing is asked of a device or of other ranks.

There is one record in a process, as there is one set of connections. Nothing decides anything by it. What a replayed
graph sends is not in it. A channel must not be used by two threads at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch.distributed as dist

RECENT = 64
"""Operations of which a report shows the order."""

_Key: TypeAlias = tuple[str, Any, str, int | None]
"""Axis, group, "collective", "send" or "receive", and the peer's place in the group where there is one."""

TRANSFERS = ("send", "receive")


@dataclass(frozen=True, kw_only=True, slots=True)
class Noted:
    """One operation, in numbers of the whole run, as other ranks can read it.

    Args:
        channel: the same text on all ranks that take part.
        members: those ranks.
        operation: such as all_reduce.
        number: its place among the operations of the channel, from 1.
        seconds: since it began.
        is_transfer: a send or a receive, which is one operation with two names.
    """

    channel: str
    members: tuple[int, ...]
    operation: str
    number: int
    seconds: float
    is_transfer: bool = False


class OperationLog:
    """Operations of this process since it began. Any thread may note, any other may read."""

    def __init__(self) -> None:
        self._counts: dict[_Key, tuple[int, str, float]] = {}
        self._recent: deque[tuple[_Key, int, str, float]] = deque(maxlen=RECENT)
        self._waits: dict[int, tuple[_Key, int, str, float]] = {}
        self.total = 0
        """Operations begun and waits ended: a hang is where it stays the same."""

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

    def wait_ended(self) -> None:
        """Notes that this thread's wait has ended."""
        self._waits.pop(threading.get_ident(), None)
        self.total += 1

    @contextmanager
    def blocking(self, operation: str, axis: str, group: Any) -> Iterator[None]:
        """Notes an operation that is begun and waited for in one."""
        self.waiting(operation, axis, group, None, self.began(operation, axis, group))
        try:
            yield
        finally:
            self.wait_ended()

    def last(self) -> list[Noted]:
        """Returns the last operation of each channel."""
        now = time.monotonic()
        return [_noted(key, *rest, now) for key, rest in list(self._counts.items())]

    def recent(self) -> list[Noted]:
        """Returns the last operations of all channels, in their order."""
        now = time.monotonic()
        return [_noted(*entry, now) for entry in list(self._recent)]

    def waits(self) -> dict[int, Noted]:
        """Returns what each waiting thread waits for, by the thread's identifier."""
        now = time.monotonic()
        return {thread: _noted(*entry, now) for thread, entry in list(self._waits.items())}


LOG = OperationLog()
"""The operation log of this process."""


def _noted(key: _Key, number: int, operation: str, since: float, now: float) -> Noted:
    axis, group, kind, peer = key
    ranks = tuple(dist.get_process_group_ranks(group))
    is_transfer = kind in TRANSFERS
    if is_transfer:
        assert peer is not None
        ends = (dist.get_rank(), ranks[peer])
        source, target = ends if kind == "send" else ends[::-1]
        channel, members = f"axis {axis} from rank {source} to rank {target}", (source, target)
    else:
        channel, members = f"axis {axis} of ranks {', '.join(map(str, ranks))}", ranks
    return Noted(
        channel=channel,
        members=members,
        operation=operation,
        number=number,
        seconds=now - since,
        is_transfer=is_transfer,
    )
