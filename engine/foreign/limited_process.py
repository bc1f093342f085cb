"""A process for work on files that others wrote: it may hang, fill the memory or crash, and is killed.

The process serves requests one after the other. Both ends speak in messages of a kind (one byte) and bytes. The
process itself limits its processor time and its memory (`engine.foreign.limits`), by means of the kernel, which reach
into any call of a library; the caller limits the time that it waits, and kills the process after that.

Neither a suspended machine nor a stopped process group uses up that time (`engine.foreign.streams`).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from engine.files import platforms
from engine.files.strict_json import JsonFlaw
from engine.foreign.connected import connection_of_parent, start_connected
from engine.foreign.deadline import Deadline
from engine.foreign.frames import HEADER_BYTES, receive_bytes, send_bytes
from engine.foreign.signals import signal_name
from engine.foreign.streams import LimitedStream

_ROOT = Path(__file__).resolve().parents[2]
# the folder in place of the current one, which is first on the path of `python -c` and may hold anything
_PROGRAM = "import sys; sys.path[0] = sys.argv[1]; import importlib; importlib.import_module(sys.argv[2]).main()"
_WAIT_SECONDS = 1.0
_STATUS_OF_EXCEPTION = 1
MOST_BYTES = 1 << 30
"""Size limit of one message that is received."""
_SHOWN_ERRORS = 4000
"""Bytes of the end of its standard error, which may be long."""


class OutOfTime(Exception):
    """Raised where the process did not answer in time, or had used up its processor time; it is killed."""


class Crashed(Exception):
    """Raised where the process ended, or its connection, by no exception; its words name the signal or the status."""


class LimitedProcess:
    """A process that serves requests. It ends with this object, or with this process.

    Args:
        module: its `main` serves the requests that come from `Messages.of_standard_input`.
        environment: variables of the process.
    """

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        command = [sys.executable, "-c", _PROGRAM, str(_ROOT), module]
        self._process, own = start_connected(command, self._errors, environment)
        self._messages = Messages(own)
        self._finalizer = weakref.finalize(self, _end, self._process, own)
        self._finalizer.atexit = False  # the process reads that its socket is closed

    def send(self, kind: bytes, data: bytes, seconds: float) -> None:
        """Sends a request.

        Raises:
            OutOfTime, Crashed: it does not read it within these seconds.
        """
        try:
            self._messages.send(kind, data, seconds)
        except TimeoutError:
            self.close()
            raise OutOfTime from None
        except OSError:
            raise self._ended() from None

    def receive(self, seconds: float) -> tuple[bytes, bytes]:
        """Receives a message: its kind and its bytes.

        Raises:
            OutOfTime, Crashed: there is none within these seconds.
        """
        try:
            return self._messages.receive(seconds)
        except TimeoutError:
            self.close()
            raise OutOfTime from None
        except (OSError, EOFError, JsonFlaw):
            raise self._ended() from None

    def _ended(self) -> Exception:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_WAIT_SECONDS)
        status = self._process.poll()
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _SHOWN_ERRORS))
        said = self._errors.read().decode(errors="replace")
        self.close()
        if platforms.is_killed_by(status, "SIGPROF"):
            return OutOfTime()
        if status is not None and status < 0:
            return Crashed(signal_name(-status))
        if status != _STATUS_OF_EXCEPTION:  # a library may end its process, or close the connection
            return Crashed("its connection was closed" if status is None else f"status {status}")
        return RuntimeError(f"a process of this program ended with status {status}:\n{said}")

    def close(self) -> None:
        """Kills the process."""
        self._finalizer()
        self._errors.close()


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    process.kill()  # nothing of it is worth waiting for
    process.wait()


class Messages:
    """Messages over a socket, each of a kind and bytes.

    Args:
        connection: is closed by its owner.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    @classmethod
    def of_standard_input(cls) -> Messages:
        """Returns the messages of a process that a `LimitedProcess` started."""
        return cls(connection_of_parent())

    def send(self, kind: bytes, data: bytes = b"", seconds: float | None = None) -> None:
        """Sends a message.

        Args:
            kind: one byte.
            seconds: to wait for the other end; None for ever.

        Raises:
            OSError: the other end is gone, or does not read in time (TimeoutError).
        """
        send_bytes(self._stream(seconds), kind, data)

    def receive(self, seconds: float | None = None) -> tuple[bytes, bytes]:
        """Receives a message: its kind and its bytes.

        Raises:
            EOFError: the other end is closed.
            JsonFlaw: it is too long.
            OSError: there is none in time (TimeoutError), or the connection failed.
        """
        message = receive_bytes(self._stream(seconds))
        return message[:1], message[1:]

    def _stream(self, seconds: float | None) -> LimitedStream:
        deadline = None if seconds is None else Deadline(seconds)
        return LimitedStream(self._connection, deadline, most_bytes=HEADER_BYTES + MOST_BYTES)
