"""Trees of documents: spans and blocks against a mask that is built token by token."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise

import pytest
import torch

from engine.branches import check_parents, continuations, depths, levels, shifted


def _random_tree(seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    draw = random.Random(seed)
    parents: list[int] = []
    path: list[int] = []
    for number in range(draw.randint(1, 9)):
        path = path[: draw.randint(0, len(path))]
        parents.append(path[-1] if path else -1)
        path.append(number)
    return tuple(draw.randint(1, 5) for _ in parents), tuple(parents)


def _seen(lengths: tuple[int, ...], parents: tuple[int, ...]) -> torch.Tensor:
    """Returns [T, T], whether a token sees another."""
    firsts, total = [0, *accumulate(lengths)], sum(lengths)
    seen = torch.zeros(total, total, dtype=torch.bool)
    for number in range(len(lengths)):
        for token in range(firsts[number], firsts[number + 1]):
            seen[token, firsts[number] : token + 1] = True
            before = parents[number]
            while before >= 0:
                seen[token, firsts[before] : firsts[before + 1]] = True
                before = parents[before]
    return seen


@pytest.mark.parametrize("seed", range(40))
def test_levels_are_the_keys_of_continued_documents(seed: int) -> None:
    lengths, parents = _random_tree(seed)
    check_parents(parents, len(lengths))
    found = torch.zeros(sum(lengths), sum(lengths), dtype=torch.int64)
    firsts = [0, *accumulate(lengths)]
    for first, stop in pairwise(firsts):
        found[first:stop, first:stop] = torch.ones(stop - first, stop - first).tril()
    for level in levels(lengths, parents):
        queries, keys = [block.query for block in level], [block.key for block in level]
        for spans in (queries, keys):
            assert all(a.stop <= b.start for a, b in pairwise(spans)), "blocks of a level overlap"
        for block in level:
            assert not block.causal
            found[block.query.start : block.query.stop, block.key.start : block.key.stop] += 1
    assert found.eq(_seen(lengths, parents)).all()


def test_documents_that_continue_none_have_no_levels() -> None:
    assert levels((3, 2), ()) == levels((3, 2), (-1, -1)) == ()
    assert continuations((3, 2), (-1, -1)) == ((3, 3), (5, 5))


def test_order_is_checked() -> None:
    check_parents((-1, 0, 1, 0, -1, 4), 6)
    with pytest.raises(AssertionError):
        check_parents((-1, 0, -1, 0), 4)  # a document between a root and its branch


def test_shifted_and_depths() -> None:
    assert shifted((-1, 0, 0), 3, 5) == (-1, 5, 5)
    assert shifted((), 2, 5) == (-1, -1)
    assert depths((-1, 0, 1, 0, -1)) == (0, 1, 2, 1, 0)
