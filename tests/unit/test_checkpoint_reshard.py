"""Interval arithmetic between layouts, against plain slicing by torch."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint.reshard import Box, box_spec, find_gap, plan_copies
from engine.distributed.sharding import Piece, ShardSpec


@st.composite
def cuts(draw: st.DrawFn, length: int) -> list[tuple[int, int]]:
    """[0, length) cut into (offset, length) runs."""
    inner = draw(st.sets(st.integers(1, length - 1), max_size=4)) if length > 1 else set()
    edges = [0, *sorted(inner), length]
    return [(start, stop - start) for start, stop in itertools.pairwise(edges)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[ShardSpec, list[Box], torch.Tensor]:
    """A wanted shard with gaps of padding, stored pieces along any dimension, and the local tensor by slicing."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    stored_dim = draw(st.sampled_from([None, *range(len(shape))]))
    stored = [Box()] if stored_dim is None else [Box(stored_dim, *run) for run in draw(cuts(shape[stored_dim]))]
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape) + 1
    dim = draw(st.sampled_from([None, *range(len(shape))]))
    if dim is None:
        return ShardSpec(global_shape=shape, local_shape=shape), draw(st.permutations(stored)), whole
    runs = draw(st.permutations(draw(cuts(shape[dim]))))
    pieces, parts, position = [], [], 0
    for offset, length in runs[: draw(st.integers(0, len(runs)))]:
        pieces.append(Piece(offset, position, length))
        padding = draw(st.integers(0, 2))
        parts.append(whole.narrow(dim, offset, length))
        parts.append(torch.zeros(*shape[:dim], padding, *shape[dim + 1 :], dtype=whole.dtype))
        position += length + padding
    local_shape = (*shape[:dim], position, *shape[dim + 1 :])
    local = torch.cat(parts, dim) if parts else torch.zeros(local_shape, dtype=whole.dtype)
    spec = ShardSpec(global_shape=shape, local_shape=local_shape, dim=dim, pieces=tuple(pieces))
    return spec, draw(st.permutations(stored)), local


@settings(max_examples=300, deadline=None)
@given(cases())
def test_copies_give_what_slicing_gives(case: tuple[ShardSpec, list[Box], torch.Tensor]) -> None:
    spec, stored, expected = case
    whole = torch.arange(torch.Size(spec.global_shape).numel()).reshape(spec.global_shape) + 1
    pieces = [whole if box.dim is None else whole.narrow(box.dim, box.offset, box.length) for box in stored]
    local = torch.zeros(spec.local_shape, dtype=whole.dtype)
    for copy in plan_copies(spec, stored):
        assert local[copy.local_slices].numel() == copy.num_elements
        local[copy.local_slices] = pieces[copy.source][copy.source_slices]
    assert torch.equal(local, expected)


def test_only_the_pieces_that_are_needed_are_touched() -> None:
    stored = [Box(0, start, 4) for start in range(0, 16, 4)]
    copies = plan_copies(box_spec((16, 3), Box(0, 4, 4)), stored)
    assert [copy.source for copy in copies] == [1]
    across = plan_copies(box_spec((16, 4), Box(1, 1, 2)), stored)
    assert [copy.source for copy in across] == [0, 1, 2, 3]
    assert {copy.num_elements for copy in across} == {8}


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ([(0, 4), (4, 6)], None),
        ([(4, 6), (0, 4)], None),
        ([(0, 4), (5, 5)], "hole at [4, 5)"),
        ([(0, 4), (3, 7)], "overlap at 3"),
        ([(0, 4), (4, 5)], "end at 9"),
        ([(1, 9)], "hole at [0, 1)"),
    ],
)
def test_gaps_are_named(runs: list[tuple[int, int]], words: str | None) -> None:
    found = find_gap(10, runs)
    assert found is None if words is None else found is not None and words in found
