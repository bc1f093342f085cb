"""The contents of a terminal: a line at its bottom that is rewritten, with a bar and colours, and messages above it.

rich draws, which knows the width of characters, NO_COLOR and the number of colours; it is imported only where
there is a terminal. Streams that are not terminals, and TERM=dumb, get plain lines from their callers.
"""

from __future__ import annotations

import os
import textwrap
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.text import Text

_BARS = (24, 16, 8)
"""Lengths of a bar; few, so that it does not change with every figure beside it."""
_WIDE_ENOUGH = 60
"""Columns from which on a bar takes the place of the last figures."""
_REWRITE = "\r\x1b[K"
_PREFIXES = {"error:": "bold red", "warning:": "yellow"}
_LEAVE_SECONDS = 0.2


class _Bottom:
    """The line at the bottom: its stream and its contents."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.stream: TextIO | None = None
        self.text = ""


_BOTTOM = _Bottom()


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusLine:
    """A line of figures that fits a terminal.

    Args:
        head: the work, and its progress.
        fraction: its progress, from 0 to 1; None where that is unknown.
        fields: figures, by weight: those that do not fit are left out from the end.
    """

    head: str
    fraction: float | None = None
    fields: Sequence[str] = ()

    def fitted(self, width: int, *, unicode: bool = True) -> Text:
        """Returns the line in at most `width` columns."""
        from rich.cells import cell_len
        from rich.text import Text

        line = Text(self._short_head(width // 2), style="bold")
        percent = "" if self.fraction is None else f"{int(100 * self.fraction):3d}%"
        least = 1 + _BARS[-1] if percent and width >= _WIDE_ENOUGH else 0
        room = width - cell_len(line.plain) - (2 + len(percent) if percent else 0)
        fields = []
        for field in self.fields:
            if room - least < 2 + cell_len(field):
                break
            fields.append(field)
            room -= 2 + cell_len(field)
        if self.fraction is not None:
            length = next((bar for bar in _BARS if bar < room), 0)
            done = round(length * self.fraction)
            line.append(f"  {percent}", style="not bold")
            if length:
                full, empty = ("━", "─") if unicode else ("#", "-")
                line.append(" " + full * done, style="not bold cyan")
                line.append(empty * (length - done), style="not bold bright_black")
        line.append("".join(f"  {field}" for field in fields), style="not bold")
        line.truncate(width, overflow="crop")
        return line

    def _short_head(self, width: int) -> str:
        """Returns the head in at most so many columns, where figures follow it: a path keeps its end."""
        first, _, rest = self.head.partition(" ")
        kept = width - len(first) - 2
        if not self.fields or len(self.head) <= width or kept < 1:
            return self.head
        return f"{first} …{rest[-kept:]}"


def is_terminal(stream: TextIO) -> bool:
    """Returns whether lines of the stream can be rewritten and coloured."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def show_at_bottom(line: StatusLine, stream: TextIO) -> None:
    """Rewrites the line at the bottom of a terminal."""
    columns, is_unicode = _columns(stream), (stream.encoding or "utf-8").lower().startswith("utf")
    text = _drawn(line.fitted(columns - 1, unicode=is_unicode), stream)
    with _BOTTOM.lock:
        _BOTTOM.stream, _BOTTOM.text = stream, text
        stream.write(f"{_REWRITE}{text}")
        stream.flush()


def leave_bottom() -> None:
    """Leaves the bottom line as it is, and continues below it."""
    # a process that ends may be in the midst of a line
    if not _BOTTOM.lock.acquire(timeout=_LEAVE_SECONDS):
        return
    try:
        stream, _BOTTOM.stream = _BOTTOM.stream, None
        if stream is not None:
            stream.write("\n")
            stream.flush()
    finally:
        _BOTTOM.lock.release()


def print_line(line: str, stream: TextIO) -> None:
    """Prints a line, above the one at the bottom where there is one."""
    if not is_terminal(stream):
        print(line, file=stream, flush=True)
        return
    for prefix, style in _PREFIXES.items():
        if line.startswith(prefix):
            from rich.text import Text

            line = _drawn(Text(prefix, style=style), stream) + line.removeprefix(prefix)
    with _BOTTOM.lock:
        before, after = (_REWRITE, _BOTTOM.text) if _BOTTOM.stream is stream else ("", "")
        stream.write(f"{before}{line}\n{after}")
        stream.flush()


def wrapped(line: str, stream: TextIO, *, indent: int = 2) -> str:
    """Returns a line broken between words where the terminal ends, the rest indented; an indented line as it is."""
    if line.startswith(" ") or "\n" in line:
        return line
    width = max(_columns(stream) - 1, 20)
    return textwrap.fill(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def _drawn(text: Text, stream: TextIO) -> str:
    """Returns a line with the terminal's codes for its styles."""
    from rich.console import Console

    console = Console(file=stream, width=_columns(stream), highlight=False)
    with console.capture() as capture:
        console.print(text, end="", no_wrap=True, overflow="crop")
    return capture.get()


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except OSError:  # a terminal of a test, or of a notebook
        from shutil import get_terminal_size

        return get_terminal_size().columns
