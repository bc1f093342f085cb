"""The rows of conversations between two turns: they wait in the cache, and the next turn computes its new tokens alone.

A conversation that waits for its next prompt has no slot: its row lies in one of the cache's places for rows that wait.
There is a place for every conversation that may be under way, which keeps it until it ends, and a first prompt begins
when there is one for it. So what is kept of a row follows from its tokens and never from the time at
which prompts come, and neither do its bits: a turn has a pass of its own, as has a first prompt. Only those share one
that begin before any other, of prompts that are known from the start.

The last token of a turn is the input of no pass yet; the pass of the next turn begins with it. A row may have been in a
further pass, if its end was found late. Keys and values of that pass are overwritten, but states cannot be taken back.
So a row with states takes part in exactly one further pass, and the next turn begins behind its last token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from engine.inference.model_part import InferenceStage
from engine.inference.rows import Request, Row

RECOMPUTED = "each turn computes its whole conversation anew: layers keep more of a row than keys, values and states"
"""The note on models whose rows are not continued."""


class WaitingRows:
    """The conversations under way on a stage whose cache has places for them.

    Args:
        stage: of this rank.
        together: tokens of the prompts that begin before any other, in one pass.
    """

    def __init__(self, stage: InferenceStage, together: int) -> None:
        self._stage, self._together = stage, together
        self._places = [*stage.cache.waiting_rows]
        self._kept: dict[int, tuple[Row, int]] = {}
        """The row of a conversation, by its number in the run, and the place where it waits."""
        self._under_way = set[int]()
        self._turns = deque[Request]()
        self.recomputed = False
        """Whether a row could not be continued because of what its layers keep."""

    @property
    def room(self) -> int:
        """The conversations that may begin."""
        return self._stage.cache.conversations - len(self._under_way)

    @property
    def is_ready(self) -> bool:
        """Whether a turn can begin."""
        return any(request.row in self._kept for request in self._turns)

    def tokens_together(self) -> int:
        """Returns the tokens that the prompts of the next pass may have, if they are several."""
        together, self._together = self._together, 1
        return together

    def begin(self, request: Request) -> None:
        """Lets a conversation be under way."""
        self._under_way.add(request.row)

    def sorted(self, requests: Iterable[Request]) -> list[Request]:
        """Takes the prompts of conversations that are under way; returns the others."""
        first = []
        for request in requests:
            (self._turns if request.row in self._under_way else first).append(request)
        return first

    def end(self, rows: Iterable[int]) -> None:
        """Lets go of conversations, by their numbers in the run."""
        for number in rows:
            self._under_way.discard(number)
            if number in self._kept:
                self._stage.free(self._take_back(number)[1])

    def leaves(self, row: Row, most: int) -> bool:
        """Returns whether a row has been in all of its passes.

        Args:
            most: the most tokens that follow its prompt.
        """
        if not self._stage.carries_states:
            return row.ending is not None or row.launched == most
        return row.launched > (most if row.ending is None else len(row.ids))

    def keep(self, row: Row, slot: int) -> None:
        """Has the row in a slot wait."""
        if row.request.row not in self._under_way:  # it has ended meanwhile
            self._stage.free(slot)
            return
        place = self._places.pop()
        self._stage.cache.move(slot, place)
        self._kept[row.request.row] = row, place

    def next(self, slot: int) -> tuple[Request, int] | None:
        """Takes a turn that can begin, and gives its row a free slot; None where there is none.

        Returns:
            The turn, and how many of its first tokens are in the cache; 0 where the slot is still free, because what is
            in the cache is not what it continues.
        """
        request = next((one for one in self._turns if one.row in self._kept), None)
        if request is None:
            return None
        self._turns.remove(request)
        row, place = self._take_back(request.row)
        tokens = (*row.request.ids, *row.ids)
        count = len(tokens) - (not self._stage.carries_states)
        keeps_all = self._stage.cache.can_continue(place, count, count)
        self.recomputed |= not keeps_all
        if not keeps_all or len(request.ids) <= count or request.ids[:count] != tokens[:count]:
            self._stage.free(place)
            return request, 0
        self._stage.cache.move(place, slot)
        return request, count

    def _take_back(self, number: int) -> tuple[Row, int]:
        row, place = self._kept.pop(number)
        self._places.append(place)
        return row, place
