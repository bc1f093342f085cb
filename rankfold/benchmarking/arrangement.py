"""Arranges which sides of a step are alive together: all of them, or one at a time where a GPU has no room for all.

A side's process keeps its model, and its allocator keeps a step's memory, for as long as it lives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_ROOM = 0.9
"""Share of a GPU's memory that sides may hold together; the floor's operands come on top of the engine's."""
_ROUNDS = 3
"""Rounds of each side where it runs alone, so that the machine's slow phases do not affect one side only."""


class Block(NamedTuple):
    """Sides whose processes live at the same time, and the number of timed turns before these end."""

    names: tuple[str, ...]
    repeats: int


class Arrangement(NamedTuple):
    """The blocks in their order, and a sentence about it."""

    blocks: tuple[Block, ...]
    sentence: str


def arrange(shares: Mapping[str, float | None], repeats: int) -> Arrangement:
    """Returns the blocks of a measurement; every side has `repeats` turns in all.

    Args:
        shares: side -> share of the GPU's memory that its process held alone; None on a CPU.
    """
    names, held = tuple(shares), sum(share or 0.0 for share in shares.values())
    if len(names) == 1 or held <= _ROOM:
        return Arrangement((Block(names, repeats),), "All sides were alive at once and took turns.")
    rounds = min(_ROUNDS, repeats)
    turns = [repeats // rounds + (index < repeats % rounds) for index in range(rounds)]
    blocks = []
    for index, count in enumerate(turns):
        blocks += [Block((name,), count) for name in (names if index % 2 == 0 else names[::-1])]
    return Arrangement(
        tuple(blocks),
        f"Together the sides would hold {held:.0%} of the GPU's memory, so each ran alone, in {rounds} "
        f"round{'s' if rounds > 1 else ''} of {', '.join(map(str, turns))} timed steps, its process closed in between; "
        "a ratio is of steps of the same round.",
    )
