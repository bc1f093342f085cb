"""Lines for the person watching: free of control characters, and not worth ending a run for.

Results go to stdout; whoever stops reading them has a command fail. What a command says of its progress goes to stderr,
and a command outlives the reader of that: what nobody can read is dropped.
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


def say(line: str, stream: TextIO | None = None) -> None:
    """Prints a line at once; None is stderr."""
    print(printable(line), file=sys.stderr if stream is None else stream, flush=True)


_lost = threading.Event()


def is_unread() -> bool:
    """Returns whether stderr was given up in this process because nobody can read it any more."""
    return _lost.is_set()


class _OutlivesReader(io.TextIOBase):
    """A text stream that gives up, instead of raising, when what it is given cannot be written."""

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
        """What is below the text, for those who write bytes."""
        return self._stream.buffer


@contextmanager
def outliving_the_reader() -> Iterator[None]:
    """stderr may lose its reader (`2>&1 | head`), or the disk that it is written to, without an error."""
    before = sys.stderr
    sys.stderr = cast(TextIO, _OutlivesReader(before))
    try:
        yield
    finally:
        sys.stderr = before


def give_up(stream: TextIO) -> None:
    """What `stream` still holds, and whatever is written to it from now on, goes nowhere."""
    with suppress(OSError, ValueError):  # not a file, or closed
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, stream.fileno())
        os.close(sink)


def has_reader(stream: TextIO) -> bool:
    """Returns whether what is written to `stream` can still arrive; true where the system cannot tell."""
    try:
        watch = select.poll()
        watch.register(stream.fileno(), 0)
        return not any(event & (select.POLLERR | select.POLLHUP) for _, event in watch.poll(0))
    except (OSError, ValueError):
        return True
