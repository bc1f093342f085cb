"""Shows an answer while it comes: its text as it is, thoughts dimmed, calls of tools in colour.

Text is written once and never again, so nothing flickers, and Markdown stays what the model wrote. What a terminal
would obey is shown as an escape. The beginning of a tag waits for its end; nothing else does.
"""

from __future__ import annotations

from typing import NamedTuple, TextIO

from engine.printable import printable


class _Part(NamedTuple):
    """A part of an answer between two tags.

    Args:
        opens, closes: the tags, which are shown with it.
        style: the terminal's code.
    """

    opens: str
    closes: str
    style: str


_DIM, _COLOUR, _PLAIN = "\x1b[2m", "\x1b[36m", "\x1b[0m"
_PARTS = (
    _Part("<think>", "</think>", _DIM),
    _Part("<thinking>", "</thinking>", _DIM),
    _Part("[THINK]", "[/THINK]", _DIM),
    _Part("<tool_call>", "</tool_call>", _COLOUR),
    _Part("<tool_response>", "</tool_response>", _COLOUR),
)


def opens_thought(prompt: str) -> bool:
    """Returns whether a prompt ends in an opened thought, as some chat templates begin the answer."""
    return prompt.rstrip().endswith(tuple(part.opens for part in _PARTS if part.style == _DIM))


class Display:
    """Writes one answer.

    Args:
        stream: a terminal or not.
        styled: whether codes are written, and text is made safe for a terminal.
        thinks: the answer begins within a thought.
    """

    def __init__(self, stream: TextIO, *, styled: bool, thinks: bool = False) -> None:
        self._stream, self._styled = stream, styled
        self._part: _Part | None = None
        self._waiting = ""
        self._last = ""
        if styled and thinks:
            self._part = _PARTS[0]
            stream.write(_DIM)

    def add(self, text: str) -> None:
        """Shows text."""
        if not self._styled:
            self._write(text)
        else:
            self._waiting += text
            while self._next_tag():
                pass
            held = self._held()
            self._write(self._waiting[: len(self._waiting) - held])
            self._waiting = self._waiting[len(self._waiting) - held :]
        self._stream.flush()

    def finish(self) -> None:
        """Ends the answer, on a line of its own."""
        self._write(self._waiting)
        self._waiting = ""
        if self._part is not None:
            self._stream.write(_PLAIN)
        if not self._last.endswith("\n") or not self._styled:
            self._stream.write("\n")
        self._stream.flush()

    def _tags(self) -> list[str]:
        return [part.opens for part in _PARTS] if self._part is None else [self._part.closes]

    def _next_tag(self) -> bool:
        """Writes up to the next tag and the tag itself; returns whether there was one."""
        found = [(place, tag) for tag in self._tags() if (place := self._waiting.find(tag)) >= 0]
        if not found:
            return False
        place, tag = min(found)
        before, self._waiting = self._waiting[:place], self._waiting[place + len(tag) :]
        self._write(before)
        if self._part is None:
            self._part = next(part for part in _PARTS if part.opens == tag)
            self._stream.write(self._part.style)
            self._write(tag)
        else:
            self._write(tag)
            self._part = None
            self._stream.write(_PLAIN)
        return True

    def _held(self) -> int:
        """Returns the length of the text at the end that may be the beginning of a tag."""
        lengths = [
            length
            for tag in self._tags()
            for length in range(1, min(len(tag), len(self._waiting) + 1))
            if self._waiting.endswith(tag[:length])
        ]
        return max(lengths, default=0)

    def _write(self, text: str) -> None:
        if text:
            self._stream.write(printable(text) if self._styled else text)
            self._last = text
