"""Streams text from tokens that arrive one by one, and finds stop texts that end an answer.

A token may be part of a character, and decoding a part of a text may differ from that part of the decoded text (white
space at its front). So new text is the difference of two decodings that begin at the same earlier token, and text that
ends in an unfinished character, or that may be the beginning of a stop text, is held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_UNFINISHED = "\ufffd"


class TokenDecoder(Protocol):
    """A tokenizer that can decode."""

    def decode_many(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Returns the text of each of some lists of ids, without control tokens."""
        ...


class TextStream:
    """The text stream of one row.

    Args:
        tokenizer: of the model.
        stops: texts that end the row; its text ends before them.
        before: tokens before the first that is pushed, whose text is not part of it.
    """

    def __init__(self, tokenizer: TokenDecoder, stops: Sequence[str] = (), before: Sequence[int] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._ids = list(before[-8:])
        self._begin, self._end = 0, len(self._ids)
        self._shown = 0
        self.text = ""
        """All text so far, without held-back characters."""
        self.stopped = False
        """Whether the text has ended at a stop text."""

    def push(self, token: int) -> str:
        """Takes a token; returns the text that can be shown now, which may be none."""
        return push_all([(self, token)])[0]

    def finish(self) -> str:
        """Returns the rest of the text, where no token follows."""
        if not self.stopped:
            self._decoded(*self._tokenizer.decode_many(self._waiting()), finished=True)
        return self._take(len(self.text))

    def _waiting(self) -> list[list[int]]:
        """Returns the tokens whose decodings differ in the new text."""
        return [self._ids[self._begin : self._end], self._ids[self._begin :]]

    def _decoded(self, old: str, new: str, *, finished: bool) -> None:
        if len(new) <= len(old) or (new.endswith(_UNFINISHED) and not finished):
            return
        searched = max(0, len(self.text) - max(map(len, self._stops), default=0))
        self.text += new[len(old) :]
        self._begin, self._end = self._end, len(self._ids)
        ends = [place for stop in self._stops if (place := self.text.find(stop, searched)) >= 0]
        if ends:
            self.text, self.stopped = self.text[: min(ends)], True

    def _safe(self) -> int:
        """Returns the length of the text before a possible beginning of a stop text."""
        if self.stopped:
            return len(self.text)
        held = 0
        for stop in self._stops:
            for length in range(1, min(len(stop), len(self.text) + 1)):
                if self.text.endswith(stop[:length]):
                    held = max(held, length)
        return len(self.text) - held

    def _take(self, end: int) -> str:
        new = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return new


def push_all(tokens: Sequence[tuple[TextStream, int]]) -> list[str]:
    """Gives some streams, of one tokenizer, a token each; it decodes them in one call.

    Returns:
        The text of each stream that can be shown now, which may be none.
    """
    for stream, token in tokens:
        stream._ids.append(token)
    running = [stream for stream, _ in tokens if not stream.stopped]
    if running:
        texts = iter(running[0]._tokenizer.decode_many([ids for stream in running for ids in stream._waiting()]))
        for stream in running:
            stream._decoded(next(texts), next(texts), finished=False)
    return [stream._take(stream._safe()) for stream, _ in tokens]
