"""Prints lines for the user: without control characters, and without ending a run if they cannot be printed.

Results go to stdout; a command fails when their reader has gone. Progress and messages go to stderr,
and a command outlives the reader of these: further lines are dropped.
"""

from __future__ import annotations

import io
import os
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from engine.printable import printable
from engine.telemetry.terminal import print_line


def say(line: str, stream: TextIO | None = None) -> None:
    """Prints a line at once; None is stderr."""
    print_line(printable(line), sys.stderr if stream is None else stream)


_lost = threading.Event()


def is_unread() -> bool:
    """Returns whether this process has stopped writing to stderr because it has no reader any more."""
    return _lost.is_set()


class _OutlivesReader(io.TextIOBase):
    """A text stream that discards its output, instead of raising, once writing fails."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            give_up(self._stream)
            _lost.set()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            give_up(self._stream)
            _lost.set()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self._stream.errors

    @property
    def buffer(self) -> Any:
        """The underlying binary stream."""
        return self._stream.buffer


@contextmanager
def outliving_the_reader() -> Iterator[None]:
    """Lets stderr lose its reader (`2>&1 | head`), or the disk that it is written to, without an error."""
    before = sys.stderr
    sys.stderr = cast(TextIO, _OutlivesReader(before))
    try:
        yield
    finally:
        sys.stderr = before


def print_any_name(stream: TextIO) -> None:
    """Has the stream escape characters that its encoding lacks, as stderr does, in place of an error: the name of a
    file may be any bytes, and a terminal may know ASCII alone."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")


def give_up(stream: TextIO) -> None:
    """Discards the buffer of `stream` and all that is written to it from now on."""
    with suppress(OSError, ValueError):  # not a file, or closed
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, stream.fileno())
        os.close(sink)


def has_reader(stream: TextIO) -> bool:
    """Returns whether `stream` still has a reader; true where the system cannot tell."""
    if not hasattr(select, "poll"):  # Windows
        return True
    try:
        watch = select.poll()
        watch.register(stream.fileno(), 0)
        return not any(event & (select.POLLERR | select.POLLHUP) for _, event in watch.poll(0))
    except (OSError, ValueError):
        return True
