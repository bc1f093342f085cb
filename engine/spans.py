"""Ranges of tokens, and the blocks of attention between them. No tensors."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """A range of places [start, stop) in some order of tokens."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


class Block(NamedTuple):
    """A block of attention: queries see all keys, or (causal, equal ranges) each sees itself and those before."""

    query: Span
    key: Span
    causal: bool


def merged(spans: list[Span]) -> tuple[Span, ...]:
    """Returns the same places in the same order, without empty spans and with adjacent ones merged."""
    found: list[Span] = []
    for span in spans:
        if not span.length:
            continue
        if found and found[-1].stop == span.start:
            found[-1] = Span(found[-1].start, span.stop)
        else:
            found.append(span)
    return tuple(found)
