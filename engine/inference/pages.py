"""Where the tokens of each row lie in a pool of pages: a block table for each slot, shared pages, and free ones.

Only host arithmetic: it follows from the lengths of prompts and rows, so every rank keeps the same tables, and the
pools of all layers of one capacity share one. A row keeps the token at position p at place p modulo the capacity, and
place c in page c // PAGE of its table. Rows that continue one prompt share its pages (vLLM, arXiv 2309.06180); a row
copies a shared page before it writes to it.

A row that starts reserves the pages that it may still need, so that no row ever waits for a page once it runs. Rows of
conversations, which wait between their turns, have the pages of a whole row each.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PAGE = 16
"""Tokens in a page."""
SPARE_PAGE = 0
"""The page of tokens that fill up a pass; no row has it."""


class PageTable:
    """The pages of the slots, for layers that keep `capacity` tokens of a row.

    Args:
        rows: that run at a time; the slot behind theirs is that of a prompt which waits for rows to continue it.
        capacity: tokens that are kept of a row.
        prompt, new: tokens of the longest prompt, and the most that follow one.
        group: rows that continue one prompt, one after the other; the pool is made for that. Where rows end so
            unevenly that those left are of more prompts, fewer run at a time. 1 where prompts are not shared.
        conversations: that may be under way, those that wait for their next turn among them; the slots behind the
            others are theirs. 0 where a row ends with its answer.
    """

    def __init__(self, *, rows: int, capacity: int, prompt: int, new: int, group: int, conversations: int = 0) -> None:
        self.capacity, self._rows = capacity, rows
        self._per_row, shares = _pages(capacity), group > 1
        self._reserves = shares and not conversations
        if conversations:
            pages = (conversations + shares) * self._per_row
        else:
            own = self._per_row
            if shares and prompt + new <= capacity:
                own = _pages(new) + 1  # the first one has the end of the prompt
            # as many prompts as while all rows of a group run, and again as many whose other rows have ended
            prompts = 2 * -(-rows // group) + 1 if shares else 0
            pages = rows * own + prompts * _pages(min(prompt, capacity))
        self.num_pages, slots = 1 + pages, rows + 1 + conversations
        self.table = np.full((slots, self._per_row), SPARE_PAGE, dtype=np.int32)
        self._counts, self._reserved = [0] * slots, [0] * slots
        self._readers = [0] * self.num_pages
        self._free = [*range(self.num_pages - 1, SPARE_PAGE, -1)]
        self.changed = set(range(rows))
        """Slots of rows whose pages changed since this was last cleared, other than the page of the next token, which
        `write` may change."""

    @property
    def used(self) -> int:
        """Pages that hold tokens of a row."""
        return self.num_pages - 1 - len(self._free)

    def room(self, prompt: int, new: int, *, cached: bool) -> int:
        """Returns the number of rows of a prompt that can start.

        Args:
            prompt, new: tokens of the prompt, and the most that follow it.
            cached: the prompt has its pages already.
        """
        if not self._reserves:
            return len(self._counts)  # each row has its pages
        spare = len(self._free) - sum(self._reserved) - (0 if cached else _pages(min(prompt, self.capacity)))
        if spare < 0:
            return 0
        most = self._writes(prompt, new)
        return len(self._counts) if most == 0 else spare // most

    def begin(self, slot: int, prompt: int) -> None:
        """Gives a free slot the pages of a prompt."""
        assert self._counts[slot] == 0, slot
        self._note(slot)
        for number in range(_pages(min(prompt, self.capacity))):
            self._append(slot, number)

    def continue_row(self, slot: int, kept: int, length: int) -> list[tuple[int, int]]:
        """Makes the pages of a row's positions `kept` to `length` - 1 its own.

        Returns:
            Pages to copy from, each with the page to copy to.
        """
        self._note(slot)
        written = np.arange(max(kept, length - self.capacity), length)
        pairs = [self._own(slot, number) for number in np.unique(written % self.capacity // PAGE).tolist()]
        return [pair for pair in pairs if pair is not None]

    def share(self, source: int, target: int) -> None:
        """Gives a free slot the pages of another one, which both read from now on."""
        assert self._counts[target] == 0, target
        self._note(target)
        count = self._counts[target] = self._counts[source]
        self.table[target, :count] = self.table[source, :count]
        for page in self.table[source, :count].tolist():
            self._readers[page] += 1

    def reserve(self, slot: int, prompt: int, new: int) -> None:
        """Keeps pages for the completion of a prompt in this slot."""
        self._reserved[slot] = self._writes(prompt, new) if self._reserves else 0

    def write(self, slot: int, position: int) -> tuple[int, int] | None:
        """Makes the page of a row's next position its own.

        Returns:
            The page to copy from and the page to copy to; None where there is nothing to copy.
        """
        return self._own(slot, position % self.capacity // PAGE)

    def free(self, slot: int) -> None:
        """Ends the row in this slot."""
        self._note(slot)
        for page in self.table[slot, : self._counts[slot]].tolist():
            self._readers[page] -= 1
            if self._readers[page] == 0:
                self._free.append(page)
        self.table[slot] = SPARE_PAGE
        self._counts[slot] = self._reserved[slot] = 0

    def move(self, source: int, target: int) -> None:
        """Gives the row of one slot to another, which is free."""
        assert self._counts[target] == 0, target
        self._note(source)
        self._note(target)
        self.table[target] = self.table[source]
        self.table[source] = SPARE_PAGE
        for values in (self._counts, self._reserved):
            values[target], values[source] = values[source], 0

    def places(self, slot: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns where in the pool these positions of a row lie."""
        kept = positions % self.capacity
        return self.table[slot, kept // PAGE].astype(np.int64) * PAGE + kept % PAGE

    def _writes(self, prompt: int, new: int) -> int:
        """Returns the most pages that a row takes after its prompt; its last token is not kept."""
        if new <= 1:
            return 0
        if prompt + new - 1 > self.capacity:  # it may write all of its pages
            return self._per_row
        return (prompt + new - 2) // PAGE - prompt // PAGE + 1

    def _own(self, slot: int, number: int) -> tuple[int, int] | None:
        """Makes a page of a row, or the one behind its last, its own; see `write`."""
        if number >= self._counts[slot]:
            self._reserved[slot] = max(0, self._reserved[slot] - 1)
            self._append(slot, number)
            return None
        page = int(self.table[slot, number])
        if self._readers[page] == 1:
            return None
        self._reserved[slot] = max(0, self._reserved[slot] - 1)
        self._readers[page] -= 1
        copy = self._take()
        self.table[slot, number] = copy
        return page, copy

    def _note(self, slot: int) -> None:
        if slot < self._rows:
            self.changed.add(slot)

    def _append(self, slot: int, number: int) -> None:
        assert number == self._counts[slot], (slot, number)
        self.table[slot, number] = self._take()
        self._counts[slot] += 1

    def _take(self) -> int:
        page = self._free.pop()
        self._readers[page] = 1
        return page


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE)
