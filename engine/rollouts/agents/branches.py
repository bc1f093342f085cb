"""The turns of one conversation that a client drives, as a tree: a request continues the turn whose tokens or messages
it begins with, or begins a branch of its own.

Tokens are never made from text again: a request that continues a turn has that turn's tokens in front, whatever a
template would write there today.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A conversation after a turn of the model.

    Args:
        prompt: token ids of its first request.
        tokens: behind the prompt, the turn's included.
        logps: of each of them when it was sampled; 0 of those that were not.
        written: whether each of them came from the client.
        own: tokens of its last turn.
        turns: of the model, this one included.
        calls: of tools, in all of them.
        given: messages of the first request.
        messages: those behind them, the turn's included.
        seen: `given` and `messages` as texts to compare; () where the client sent token ids.
        tools: of the requests, as a text to compare.
        routes: [tokens of it all - 1, layers, experts of a token], the experts that a server chose; None for none.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logps: tuple[float, ...]
    written: tuple[bool, ...]
    own: int
    turns: int
    calls: int
    given: tuple[dict[str, Any], ...]
    messages: tuple[dict[str, Any], ...]
    seen: tuple[str, ...] = ()
    tools: str = ""
    routes: NDArray[Any] | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """All its tokens."""
        return self.prompt + self.tokens

    @property
    def num_sampled(self) -> int:
        """Tokens that the model sampled."""
        return len(self.tokens) - sum(self.written)


class Branches:
    """The turns of a conversation so far."""

    def __init__(self) -> None:
        self._turns: list[Turn] = []
        self._continued: set[int] = set()
        """Places of turns that others continue."""

    def __len__(self) -> int:
        return len(self._turns)

    def by_messages(self, seen: Sequence[str], roles: Sequence[str], tools: str) -> Turn | None:
        """Returns the longest turn that a request continues; None for none.

        Args:
            seen: its messages, as texts to compare.
            roles: of its messages.
            tools: of the request.
        """
        found: Turn | None = None
        for one in self._turns:
            count = len(one.seen)
            continues = 0 < count < len(seen) and tuple(seen[:count]) == one.seen and one.tools == tools
            # of equal ones the last, as a client that asked again has its answer
            if continues and "assistant" not in roles[count:] and (found is None or count >= len(found.seen)):
                found = one
        return found

    def by_ids(self, ids: Sequence[int]) -> Turn | None:
        """Returns the longest turn whose tokens a request begins with; None for none."""
        found: Turn | None = None
        for one in self._turns:
            own = one.ids
            if tuple(ids[: len(own)]) == own and (found is None or len(own) >= len(found.ids)):
                found = one
        return found

    def add(self, turn: Turn, before: Turn | None) -> None:
        """Adds a turn behind another one, or behind none."""
        if before is not None:
            self._continued.add(next(place for place, one in enumerate(self._turns) if one is before))
        self._turns.append(turn)

    def ends(self) -> list[Turn]:
        """Returns the last turn of each branch; that which is trained on comes first: it has most sampled tokens, and
        of several with as many the smallest ids, so that the order in which requests came does not matter."""
        found = [one for place, one in enumerate(self._turns) if place not in self._continued]
        return sorted(found, key=lambda one: (-one.num_sampled, one.ids))

    def num_sampled(self) -> int:
        """Returns the tokens that the model sampled in all branches, those that several share counted once."""
        return sum(one.own for one in self._turns)
