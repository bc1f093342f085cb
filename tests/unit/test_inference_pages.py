"""The pages of a cache: every row reads its own tokens, whatever it shares with others, and no page is lost."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine.inference.pages import PAGE, SPARE_PAGE, PageTable


class Pool:
    """A table with the pool it is about; a token is the pair of its row and position, or of its prompt."""

    def __init__(self, table: PageTable, capacity: int) -> None:
        self.table, self._capacity = table, capacity
        self._places: list[tuple[object, ...]] = [()] * (table.num_pages * PAGE)
        self.rows: list[list[tuple[object, ...]]] = []
        self.waiting: list[tuple[object, ...]] | None = None

    def begin(self, members: int, prompt: list[tuple[object, ...]], new: int, *, waits: bool) -> None:
        first = len(self.rows)
        self.table.begin(first, len(prompt))
        kept = np.arange(max(0, len(prompt) - self._capacity), len(prompt))
        for place, position in zip(self.table.places(first, kept).tolist(), kept.tolist(), strict=True):
            self._places[place] = prompt[position]
        for slot in range(first + 1, first + members):
            self.table.share(first, slot)
        if waits:
            self.table.share(first, self.last)
            self.waiting = prompt
        self._start(members, prompt, new)

    def begin_more(self, members: int, new: int) -> None:
        assert self.waiting is not None
        for slot in range(len(self.rows), len(self.rows) + members):
            self.table.share(self.last, slot)
        self._start(members, self.waiting, new)

    @property
    def last(self) -> int:
        return len(self.table.table) - 1

    def _start(self, members: int, prompt: list[tuple[object, ...]], new: int) -> None:
        for _ in range(members):
            self.table.reserve(len(self.rows), len(prompt), new)
            self.rows.append([*prompt])

    def write(self, name: int) -> None:
        """One token of every row."""
        copies = [self.table.write(slot, len(row)) for slot, row in enumerate(self.rows)]
        self._copy([pair for pair in copies if pair is not None])
        for slot, row in enumerate(self.rows):
            (place,) = self.table.places(slot, np.array([len(row)])).tolist()
            assert place >= PAGE, "the page of nobody"
            self._places[place] = token = (name, slot)
            row.append(token)

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        for pair in pairs:
            source, target = (page * PAGE for page in pair)
            self._places[target : target + PAGE] = self._places[source : source + PAGE]

    def add(self, slot: int, tokens: list[tuple[object, ...]]) -> None:
        """Several tokens of one row."""
        start = len(self.rows[slot])
        self.rows[slot] += tokens
        self._copy(self.table.continue_row(slot, start, start + len(tokens)))
        kept = np.arange(max(start, len(self.rows[slot]) - self._capacity), len(self.rows[slot]))
        for place, position in zip(self.table.places(slot, kept).tolist(), kept.tolist(), strict=True):
            self._places[place] = self.rows[slot][position]

    def check(self) -> None:
        for slot, row in enumerate(self.rows):
            kept = np.arange(max(0, len(row) - self._capacity), len(row))
            found = [self._places[place] for place in self.table.places(slot, kept).tolist()]
            assert found == row[-self._capacity :]

    def end(self, slot: int) -> None:
        self.table.free(slot)
        last = self.rows.pop()
        if slot < len(self.rows):
            self.table.move(len(self.rows), slot)
            self.rows[slot] = last


@pytest.mark.parametrize("window", [None, 24, 16, 5])
@pytest.mark.parametrize("group", [1, 4])
def test_rows_read_their_own_tokens(window: int | None, group: int) -> None:
    """Rows of prompts of all lengths come, share, write and end at random. Without copies a row finds what another
    one wrote, and where a page is given back too early, or reservations are too small, the pool runs dry or mixes
    rows."""
    slots, longest, most_new = 6, 40, 37
    draw = random.Random(f"{window} {group}")
    capacity = min(longest + most_new, window or longest + most_new)
    table = PageTable(rows=slots, capacity=capacity, prompt=longest, new=most_new, group=group)
    pool, left, new, started = Pool(table, capacity), 0, 1, 0
    for step in range(400):
        free = slots - len(pool.rows)
        if pool.waiting is not None and free:
            count = min(left, free, table.room(len(pool.waiting), new, cached=True))
            pool.begin_more(count, new)
            left -= count
        elif free:
            length, new = draw.randint(1, longest), draw.randint(1, most_new)
            count = min(group, free, table.room(length, new, cached=False))
            assert count or pool.rows, "a pool has room for one row"
            if count:
                left, started = group - count, started + 1
                pool.begin(count, [(started, position, "prompt") for position in range(length)], new, waits=left > 0)
        if pool.waiting is not None and left == 0:
            table.free(pool.last)
            pool.waiting = None
        pool.check()
        for slot in reversed(range(len(pool.rows))):
            # a row ends by itself at times, and must where it has all tokens that may follow its prompt
            follow = sum(len(token) == 2 for token in pool.rows[slot])
            if follow >= new - 1 or draw.random() < 0.05:
                pool.end(slot)
        pool.write(step)
        pool.check()
    assert started > 20
    for slot in reversed(range(len(pool.rows))):
        pool.end(slot)
    if pool.waiting is not None:
        table.free(pool.last)
    assert table.used == 0 and (table.table == SPARE_PAGE).all()


def test_a_prompt_has_its_pages_once() -> None:
    """Eight rows of 100 tokens and one more each: seven pages for all, and one each for what they write."""
    table = PageTable(rows=8, capacity=164, prompt=100, new=64, group=8)
    table.begin(0, 100)
    for slot in range(1, 8):
        table.share(0, slot)
    assert table.used == 7
    for slot in range(8):
        table.reserve(slot, 100, 64)
        table.write(slot, 100)
    assert table.used == 6 + 8  # the last row to write has the page that all had
    dense = 8 * 11
    assert table.num_pages < dense


def test_rows_that_run_never_wait_for_a_page() -> None:
    """One row is left of each group: twelve prompts do not fit a pool for five, so fewer rows start; all that do reach
    their full length. Without reservations the pool runs dry."""
    rows, prompt, new = 12, 40, 37
    table, running = PageTable(rows=rows, capacity=prompt + new, prompt=prompt, new=new, group=rows), 0
    while running < rows and (count := min(rows - running, table.room(prompt, new, cached=False))):
        table.begin(running, prompt)
        for slot in range(running, running + count):
            if slot > running:
                table.share(running, slot)
            table.reserve(slot, prompt, new)
        for slot in range(running + 1, running + count):
            table.free(slot)
        running += 1
    assert 5 <= running < rows
    for position in range(prompt, prompt + new - 1):
        for slot in range(running):
            table.write(slot, position)
    for slot in range(running):
        table.free(slot)
    assert table.used == 0


@pytest.mark.parametrize("window", [None, 40, 24, 5])
def test_rows_wait_and_are_continued(window: int | None) -> None:
    """Rows that share a prompt wait apart from the slots, and are continued by several tokens, or end there. Without
    copies of the pages that they still share, one writes over another's tokens; and the pool never runs dry."""
    slots, conversations, length, draw = 4, 7, 80, random.Random(str(window))
    capacity = min(length, window or length)
    table = PageTable(
        rows=slots, capacity=capacity, prompt=length, new=length, group=slots, conversations=conversations
    )
    pool, continued = Pool(table, capacity), 0
    waiting: dict[int, list[tuple[object, ...]]] = {}
    places = [*range(slots + 1, slots + 1 + conversations)]
    for step in range(600):
        free, room = slots - len(pool.rows), conversations - len(pool.rows) - len(waiting)
        for place in [one for one in waiting if draw.random() < 0.02]:
            table.free(place)
            del waiting[place]
            places.append(place)
        if free and room and draw.random() < 0.5:
            prompt = [(step, position, "prompt") for position in range(draw.randint(1, 40))]
            pool.begin(draw.randint(1, min(free, room)), prompt, length - len(prompt), waits=False)
        elif free and waiting:
            place = draw.choice([*waiting])
            row, slot = waiting.pop(place), len(pool.rows)
            places.append(place)
            table.move(place, slot)
            pool.rows.append(row)
            pool.add(slot, [(step, number, "result") for number in range(draw.randint(1, length - len(row)))])
            continued += 1
        pool.check()
        pool.write(step)
        pool.check()
        for slot in reversed(range(len(pool.rows))):
            if len(pool.rows[slot]) >= length - 1:
                pool.end(slot)
            elif draw.random() < 0.3:
                waiting[places[-1]] = pool.rows[slot]
                table.move(slot, places.pop())
                pool.end(slot)
    assert continued > 50
    for slot in [*reversed(range(len(pool.rows))), *waiting]:
        table.free(slot)
    assert table.used == 0
