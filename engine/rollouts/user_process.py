"""A process of the user's program, which answers requests: reward functions, tools, environments.

Whatever the program does to its process (prints, leaks, hangs, crashes) stays there: a call that fails ends the process
and everything that it has started, and a later call starts another. Requests and answers are frames of JSON over one
socket.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.files.strict_json import JsonFlaw
from engine.foreign.deadline import Deadline
from engine.foreign.frames import receive_frame, send_frame
from engine.foreign.signals import signal_name
from engine.foreign.streams import LimitedStream
from engine.foreign.supervisor import ENDING_SECONDS
from engine.telemetry.torchrun import without_rank

_ROOT = Path(__file__).resolve().parents[2]
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); import importlib; "
    "from engine.foreign.supervisor import serve_supervised; "
    "serve_supervised(importlib.import_module(sys.argv[2]).serve, *map(int, sys.argv[3:]))"
)
_GONE_SECONDS = 2.0
"""Seconds that a process that has closed its connection gets to exit, before it is killed."""


class CallFailed(Exception):
    """Raised where a call gave nothing that can be used; its text is the reason.

    Args:
        hung: whether it did not come to an end.
    """

    def __init__(self, why: str, *, hung: bool = False) -> None:
        super().__init__(why)
        self.hung = hung


class UserProcess:
    """One process; started where it is first asked, and again after a failure.

    Args:
        module: its `serve` is called below a supervisor; see `engine.foreign.supervisor.serve_supervised`.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._lifeline: int | None = None
        """A pipe's end for writing: the process ends when it is closed."""
        self._lock, self._has_ended = threading.Lock(), False

    @property
    def pid(self) -> int | None:
        """The process's id; None where there is none."""
        process = self._process
        return None if process is None else process.pid

    def start(self) -> bool:
        """Starts the process, where there is none; returns whether it did.

        Raises:
            CallFailed: the run ended.
        """
        with self._lock:
            if self._has_ended:
                raise CallFailed("the run ended")
            if self._process is not None:
                return False
            self._connection, other = socket.socketpair()
            lifeline, self._lifeline = os.pipe()
            with other:
                numbers = map(str, (other.fileno(), lifeline, os.getpid()))
                # the program's output must not mix with this program's standard output; in a session
                # of its own, so that the program's child processes can be killed with it
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM, str(_ROOT), self._module, *numbers],
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    pass_fds=(other.fileno(), lifeline),
                    close_fds=True,
                    start_new_session=True,
                    env=without_rank(os.environ),
                )
            os.close(lifeline)
        return True

    def exchange(self, message: object, deadline: Deadline, *, most_bytes: int) -> Any:
        """Sends a message and returns its answer.

        Args:
            most_bytes: that the answer may have.

        Raises:
            CallFailed: there is none in time, or none that is JSON within limits.
        """
        connection = self._connection
        if connection is None:  # another thread has ended the process
            raise CallFailed("the run ended")
        stream = LimitedStream(connection, deadline, most_bytes=most_bytes)
        try:
            send_frame(stream, message)
            return receive_frame(stream)
        except TimeoutError:
            self.close()
            raise CallFailed(f"it did not come to an end within {deadline.seconds:g} s", hung=True) from None
        except JsonFlaw as flaw:
            raise self.malformed(f"what cannot be read ({flaw})") from None
        except (EOFError, OSError):
            raise CallFailed(f"its process ended {self._how_it_ended()}") from None

    def malformed(self, answer: str) -> CallFailed:
        """Ends the process, since later bytes may belong to this answer; returns the failure."""
        self.close()
        return CallFailed(f"its process answered with {answer}")

    def _how_it_ended(self) -> str:
        process = self._process
        if process is None:
            return "with the run"
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GONE_SECONDS)
        status = process.poll()
        self.close()
        if status is None:
            return "its connection"
        return f"with status {status}" if status >= 0 else f"by {signal_name(-status)}"

    def close(self) -> None:
        """Ends the process and its child processes; a later call starts another."""
        with self._lock:
            connection, lifeline, process = self._connection, self._lifeline, self._process
            self._connection = self._lifeline = self._process = None
        if connection is not None:
            connection.close()
        if lifeline is not None:
            os.close(lifeline)
        if process is not None:
            process.send_signal(signal.SIGCONT)  # a function may have stopped it, and it would not see its lifeline end
            with suppress(subprocess.TimeoutExpired):
                process.wait(2 * ENDING_SECONDS)
            with suppress(ProcessLookupError):  # all of it was ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def end(self) -> None:
        """Ends the process as `close` does; no other is started."""
        with self._lock:
            self._has_ended = True
        self.close()
