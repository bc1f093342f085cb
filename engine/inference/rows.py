"""The rows of a generation: what they continue, where they stand, and how they ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from engine.inference.text import TextStream

_PLACE_BITS = 21
"""Bits of a row's number that differ in a generation batch; those of its noise are above, up to bit 32."""
Ending = Literal["stop_token", "stop_text", "length", "interrupted"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A prompt to continue.

    Args:
        row: its number in the run.
        ids: its tokens, those that stand for features of images included.
        images: in the order of their tokens.
        max_new: the most tokens that follow; None for those of the limits.
        noise: which of a row's random numbers are its own, 0 to 2047, where a row may continue the same tokens more
            than once.
    """

    row: int
    ids: tuple[int, ...]
    images: tuple[Any, ...] = ()
    max_new: int | None = None
    noise: int = 0

    @property
    def drawn(self) -> int:
        """The coordinate of its random numbers, beside a token's place."""
        return self.row + (self.noise << _PLACE_BITS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The answer to a prompt.

    Args:
        request: the prompt.
        ids: the new tokens, the one that ended the row included.
        text: of them, without the text that ended the row; "" where no text was asked for.
        ending: why the row ended.
        logps: log-probability of each of `ids`, where the stage keeps them.
    """

    request: Request
    ids: tuple[int, ...]
    text: str
    ending: Ending
    logps: tuple[float, ...] = ()


@dataclass(slots=True)
class Row:
    """A request while it is answered.

    Args:
        stream: makes text of its tokens; None where no text is asked for.
        next_position: of the token behind the request, for rotary embeddings.
    """

    request: Request
    stream: TextStream | None
    next_position: int
    launched: int = 0
    """Tokens that passes have been launched for; `ids` are those that were read."""
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    ending: Ending | None = None

    @property
    def place(self) -> int:
        """The place of the last token in the row."""
        return len(self.request.ids) + self.launched - 1

    @property
    def position(self) -> int:
        """The position of the last token, where an image's tokens may share one."""
        return self.next_position + self.launched - 1

    def answer(self) -> Answer:
        """Returns the answer of a row that has ended."""
        assert self.ending is not None
        text = "" if self.stream is None else self.stream.text
        ids, logps = tuple(self.ids), tuple(self.logps)
        return Answer(request=self.request, ids=ids, text=text, ending=self.ending, logps=logps)
