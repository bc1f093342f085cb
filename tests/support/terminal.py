"""A program on a terminal of its own, as a user has it: Ctrl-C is a key, lines have a width."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

CTRL_C = b"\x03"


class OnTerminal:
    """A program that runs on a pseudo-terminal; leaving the context kills it.

    Args:
        command: the program and its arguments.
        environment: of the program.
        folder: in which it starts.
        columns: of the terminal.
    """

    def __init__(
        self, command: Sequence[object], environment: Mapping[str, str], folder: Path, columns: int = 80
    ) -> None:
        words = list(map(str, command))
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # what runs in the background may ignore it
            os.chdir(folder)
            os.execvpe(words[0], words, {"TERM": "xterm-256color", **environment})
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self._seen = b""

    @property
    def output(self) -> str:
        """All that has come, with the terminal's codes."""
        return self._seen.decode("utf-8", "replace")

    def press(self, key: bytes = CTRL_C) -> float:
        """Types a key; returns when."""
        os.write(self._terminal, key)
        return time.monotonic()

    def wait_for(self, pattern: str, limit: float = 90.0) -> None:
        """Until the output, after what came before this call, has the pattern."""
        begin, deadline = len(self.output), time.monotonic() + limit
        while not re.search(pattern, self.output[begin:]):
            assert self._read(deadline), f"{pattern!r} did not come:\n{self.output}"

    def wait(self, limit: float = 90.0) -> int:
        """The exit status, as of subprocess."""
        deadline = time.monotonic() + limit
        while self._read(deadline):
            pass
        assert time.monotonic() < deadline, f"not at its end after {limit:g} s:\n{self.output}"
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _read(self, deadline: float) -> bool:
        """Takes what comes; false at the end, or at the deadline."""
        while time.monotonic() < deadline:
            if select.select([self._terminal], [], [], 0.2)[0]:
                try:
                    data = os.read(self._terminal, 65536)
                except OSError as error:
                    assert error.errno == errno.EIO  # nobody has the terminal open any more
                    return False
                self._seen += data
                return bool(data)
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._terminal)  # which ends what is left, by SIGHUP
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
