"""A socket whose other end is another program: it may send without end, byte by byte, or not at all.

A socket's own timeout is that of one system call. Here all of them share a deadline, and what is received is counted.
Waits are short, and each counts for no more than it was to take: neither a machine that is suspended nor a process that
is stopped for a while uses up the time.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from socket import socket

from engine.files.strict_json import JsonFlaw
from engine.foreign.deadline import Deadline

_WAIT_SECONDS = 1.0
_PIECE = 1 << 20
"""Bytes of memory that are taken at a time: an announced length is nothing that was received."""


class LimitedStream(io.RawIOBase):
    """The bytes that a socket sends and receives in limited time.

    Args:
        connection: stays the caller's, who closes it.
        deadline: of everything together; None for none.
        most_bytes: that may be received.
    """

    def __init__(self, connection: socket, deadline: Deadline | None, *, most_bytes: int) -> None:
        super().__init__()
        self._connection, self._deadline, self._left = connection, deadline, most_bytes
        self._most = most_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Receives what is there, waiting for a first byte; returns the number of bytes, 0 at the end.

        Raises:
            JsonFlaw: there is more than was to come.
            OSError: the connection failed, or the time is over (TimeoutError).
        """
        count = self._waited(lambda: self._connection.recv_into(buffer))
        self._left -= count
        if self._left < 0:
            raise JsonFlaw(f"it has more than {self._most} bytes")
        return count

    def receive(self, count: int) -> bytes:
        """Receives so many bytes.

        Raises:
            JsonFlaw, OSError: see `readinto`.
            EOFError: the other end was closed before.
        """
        if count > self._left:
            raise JsonFlaw(f"it has more than {self._most} bytes")
        received, piece = bytearray(), memoryview(bytearray(min(count, _PIECE)))
        while (missing := count - len(received)) > 0:
            if not (size := self.readinto(piece[:missing])):
                raise EOFError
            received += piece[:size]
        return bytes(received)

    def send(self, data: bytes) -> None:
        """Sends all of some bytes.

        Raises:
            OSError: the connection failed, or the time is over (TimeoutError).
        """
        rest = memoryview(data)
        while rest:
            rest = rest[self._waited(lambda: self._connection.send(rest)) :]  # noqa: B023 - called at once

    def _waited(self, call: Callable[[], int]) -> int:
        """Returns what a call of the connection returns; repeats it until the deadline."""
        if self._deadline is None:
            self._connection.settimeout(None)
            return call()
        while True:
            wait = min(self._deadline.left(), _WAIT_SECONDS)
            if self._connection.gettimeout() != wait:  # each change is a system call
                self._connection.settimeout(wait)
            begin = time.monotonic()
            try:
                return call()
            except TimeoutError as error:
                if error.errno is not None:  # the connection's own, after which nothing comes
                    raise
                self._deadline.extend(max(time.monotonic() - begin - wait, 0.0))
