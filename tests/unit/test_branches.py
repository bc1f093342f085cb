"""Trees of documents: spans and blocks against a mask that is built token by token."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch

from engine.branches import check_parents, continuations, depths, first_positions, levels, paths, shifted
from tests.support.document_trees import random_tree, seen_tokens


@pytest.mark.parametrize("seed", range(40))
def test_levels_are_the_keys_of_continued_documents(seed: int) -> None:
    lengths, parents = random_tree(seed)
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
    assert found.eq(seen_tokens(lengths, parents)).all()


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


@pytest.mark.parametrize("seed", range(10))
def test_paths_and_positions_are_those_of_a_walk_to_the_root(seed: int) -> None:
    lengths, parents = random_tree(seed)
    for number, (path, first) in enumerate(
        zip(paths(parents, len(lengths)), first_positions(lengths, parents), strict=True)
    ):
        walk, before = [], parents[number]
        while before >= 0:
            walk, before = [before, *walk], parents[before]
        assert path == tuple(walk)
        assert first == sum(lengths[other] for other in walk)


def test_documents_that_continue_none_begin_at_position_0() -> None:
    assert paths((), 2) == ((), ())
    assert first_positions((3, 2), ()) == (0, 0)
