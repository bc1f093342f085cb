"""Ends connections of clients that neither send nor read, so that they keep no other out.

uvicorn bounds how long a connection rests between two requests, and not how long the first one takes to come, how long
its lines may, nor how long an answer waits in memory to be read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

FIRST_SECONDS, NEXT_SECONDS = 20.0, 90.0
"""Until the head of a connection's first request is there, and that of a later one; clients keep connections for a
minute."""
READ_SECONDS = 60.0
"""In which some of an answer has to be read."""
MOST = 1000
"""Connections; of more, those that have waited for a request longest are ended."""


class Connection(Protocol):
    """What is read of uvicorn's protocol objects."""

    transport: Any
    cycle: Any


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a connection was doing, and since when: the request that it was at, and the bytes that were to be read."""

    cycle: object
    to_read: int
    since: float


class Connections:
    """What the connections of a server have been doing."""

    def __init__(self) -> None:
        self._seen: WeakKeyDictionary[Connection, _Seen] = WeakKeyDictionary()

    def look(self, connections: Iterable[object], now: float) -> None:
        """Ends those that take too long.

        Args:
            connections: of uvicorn's server.
            now: seconds of a monotonic clock.
        """
        waiting: list[tuple[float, Connection]] = []
        found = [cast(Connection, one) for one in connections]
        for one in found:
            rests = one.cycle is None or one.cycle.response_complete
            to_read = int(one.transport.get_write_buffer_size())
            seen = self._seen.get(one)
            if seen is None or (seen.cycle, seen.to_read) != (one.cycle, to_read):
                self._seen[one] = seen = _Seen(one.cycle, to_read, now)
            took = now - seen.since
            if to_read:
                late = took > READ_SECONDS
            else:
                late = rests and took > (FIRST_SECONDS if one.cycle is None else NEXT_SECONDS)
            if late:
                one.transport.abort()
            elif rests:
                waiting.append((seen.since, one))
        waiting.sort(key=lambda entry: entry[0])
        for _, one in waiting[: max(0, len(found) - MOST)]:
            one.transport.abort()
