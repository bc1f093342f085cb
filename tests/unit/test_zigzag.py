"""The plan of context parallelism against the causal mask of the documents, written out pair by pair."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.spans import Block, Span, merged
from engine.zigzag import ContextLayout, make_plan, rank_columns


@st.composite
def layouts(draw: st.DrawFn) -> ContextLayout:
    """Any number of ranks, rows and documents, most of which divide by nothing, and which may continue each other."""
    row_lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    lengths: list[int] = []
    parents: list[int] = []
    for row_length in row_lengths:
        borders = draw(st.lists(st.integers(1, row_length - 1), max_size=6)) if row_length > 1 else []
        edges = [0, *sorted(set(borders)), row_length]
        lengths += [end - start for start, end in pairwise(edges)]
        path: list[int] = []
        for _ in edges[1:]:
            path = path[: draw(st.integers(0, len(path)))]
            parents.append(path[-1] if path else -1)
            path.append(len(parents) - 1)
    return ContextLayout(
        size=draw(st.integers(1, 6)),
        row_lengths=tuple(row_lengths),
        document_lengths=tuple(lengths),
        document_parents=draw(st.sampled_from([(), tuple(parents)])),
    )


def _allowed(layout: ContextLayout) -> Tensor:
    """How often each (query, key) pair of the plain flat tokens is to be computed: int [T, T]."""
    document = torch.repeat_interleave(torch.tensor(layout.document_lengths))
    seen = (document[:, None] == document[None]).int().tril()
    for number in range(len(layout.document_parents)):
        before = layout.document_parents[number]
        while before >= 0:
            seen += ((document == number)[:, None] & (document == before)[None]).int()
            before = layout.document_parents[before]
    return seen


def _held(layout: ContextLayout, rank: int) -> Tensor:
    """Plain flat places of the tokens on `rank`, in its own order, by the definition of the zig-zag."""
    found: list[int] = []
    first = 0
    for length in layout.row_lengths:
        cuts = [first + place * length // (2 * layout.size) for place in range(2 * layout.size + 1)]
        for chunk in (rank, 2 * layout.size - 1 - rank):
            found += range(cuts[chunk], cuts[chunk + 1])
        first += length
    return torch.tensor(found, dtype=torch.long)


def _num_pairs(block: Block) -> int:
    """Returns the pairs of a query and a key that it sees, which is what the block costs."""
    length = block.query.length
    return length * (length + 1) // 2 if block.causal else length * block.key.length


def _places(spans: tuple[Span, ...]) -> Tensor:
    return torch.tensor([place for span in spans for place in range(*span)], dtype=torch.long)


@given(layouts())
@settings(max_examples=150, deadline=None)
def test_every_allowed_pair_is_computed_once(layout: ContextLayout):
    computed = torch.zeros(layout.num_tokens, layout.num_tokens, dtype=torch.int32)
    for query_rank in range(layout.size):
        for key_rank in range(layout.size):
            queries, keys = _held(layout, query_rank), _held(layout, key_rank)
            for query, key, causal in chain.from_iterable(layout.rounds(query_rank, key_rank)):
                seen = torch.ones(query.length, key.length, dtype=torch.int32)
                if causal:
                    assert query == key
                    seen = seen.tril()
                computed[queries[slice(*query)][:, None], keys[slice(*key)][None]] += seen
    assert torch.equal(computed, _allowed(layout))


@given(layouts())
@settings(max_examples=150, deadline=None)
def test_steps_receive_the_keys_that_their_blocks_name(layout: ContextLayout):
    plans = [make_plan(layout, rank) for rank in range(layout.size)]
    for plan in plans:
        for distance, step in enumerate(plan.steps):
            sender = plans[step.key_rank].steps[distance]
            assert sender.query_rank == plan.rank
            raw = [blocks for blocks in layout.rounds(plan.rank, step.key_rank) if blocks]
            arrived = _places(sender.sent) if distance else torch.arange(plan.num_tokens)
            assert step.num_received == sender.num_sent == (len(arrived) if distance else 0)
            for blocks, plain_blocks in zip(step.rounds, raw, strict=True):
                for spans in ([block.query for block in blocks], [block.key for block in blocks]):
                    assert all(one.stop <= two.start for one, two in pairwise(spans)), "blocks of a round overlap"
                for block, plain in zip(blocks, plain_blocks, strict=True):
                    assert (block.query, block.causal) == (plain.query, plain.causal)
                    assert torch.equal(arrived[slice(*block.key)], torch.arange(*plain.key))
        assert sorted(step.key_rank for step in plan.steps) == list(range(layout.size))


@given(layouts())
@settings(max_examples=150, deadline=None)
def test_nothing_travels_that_is_not_read_and_nothing_twice(layout: ContextLayout):
    for plan in (make_plan(layout, rank) for rank in range(layout.size)):
        for step in plan.steps[1:]:
            rows = _places(step.sent)
            assert len(rows.unique()) == len(rows)
            mask = _allowed(layout)[_held(layout, step.query_rank)][:, _held(layout, plan.rank)]
            assert torch.equal(mask.any(0).nonzero().flatten(), rows.sort().values)


@given(layouts())
@settings(max_examples=150, deadline=None)
def test_orders_lead_there_and_back(layout: ContextLayout):
    held = torch.cat([_held(layout, rank) for rank in range(layout.size)])
    assert torch.equal(_places(layout.rank_order()), held)
    assert torch.equal(held[_places(layout.plain_order())], torch.arange(layout.num_tokens))
    assert layout.token_counts == tuple(len(_held(layout, rank)) for rank in range(layout.size))


def test_columns_by_hand():
    assert [rank_columns(16, 2, rank) for rank in range(2)] == [((0, 4), (12, 16)), ((4, 8), (8, 12))]
    # 13 * i // 6: 0 2 4 6 8 10 13
    assert [rank_columns(13, 3, rank) for rank in range(3)] == [((0, 2), (10, 13)), ((2, 4), (8, 10)), ((4, 6), (6, 8))]
    assert rank_columns(1, 2, 0) == ((0, 0), (0, 1))
    assert rank_columns(7, 1, 0) == ((0, 3), (3, 7))


def test_blocks_by_hand():
    """Row of 16 on 2 ranks: rank 0 holds columns 0-3 and 12-15, rank 1 holds 4-11; documents 0-5, 6-15."""
    layout = ContextLayout.even(size=2, num_rows=1, row_length=16, document_lengths=(6, 10))
    assert layout.rounds(0, 0) == ((((0, 4), (0, 4), True), ((4, 8), (4, 8), True)),)
    assert layout.rounds(1, 1) == ((((0, 2), (0, 2), True), ((2, 8), (2, 8), True)),)
    assert layout.rounds(1, 0) == ((((0, 2), (0, 4), False),),)
    assert layout.rounds(0, 1) == ((((4, 8), (2, 8), False),),)


def test_blocks_of_branches_by_hand():
    """The same ranks; documents 0-5, and 6-9 and 10-15, which both continue it."""
    layout = ContextLayout.even(
        size=2, num_rows=1, row_length=16, document_lengths=(6, 4, 6), document_parents=(-1, 0, 0)
    )
    assert layout.rounds(0, 0) == ((((0, 4), (0, 4), True), ((4, 8), (4, 8), True)), (((4, 8), (0, 4), False),))
    assert layout.rounds(1, 0) == ((((0, 2), (0, 4), False),), (((2, 8), (0, 4), False),))
    assert layout.rounds(0, 1) == ((((4, 8), (6, 8), False),), (((4, 8), (0, 2), False),))
    step = make_plan(layout, 0).steps[1]
    assert step.rounds == ((((4, 8), (2, 4), False),), (((4, 8), (0, 2), False),))
    assert (step.sent, step.num_received) == (((0, 4),), 4)


def test_documents_within_a_chunk_need_nobody():
    layout = ContextLayout.even(size=4, num_rows=2, row_length=64, document_lengths=(8,) * 16)
    for rank in range(4):
        plan = make_plan(layout, rank)
        assert [sum(map(len, step.rounds)) for step in plan.steps] == [4, 0, 0, 0]
        assert [step.num_sent + step.num_received for step in plan.steps] == [0, 0, 0, 0]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("row_length", [4096, 4099])
def test_long_rows_cost_the_same_everywhere(size: int, row_length: int):
    layout = ContextLayout.even(size=size, num_rows=2, row_length=row_length, document_lengths=(row_length,) * 2)
    work = [
        sum(_num_pairs(block) for other in range(size) for blocks in layout.rounds(rank, other) for block in blocks)
        for rank in range(size)
    ]
    assert sum(work) == 2 * row_length * (row_length + 1) // 2
    assert max(work) <= 1.01 * min(work)


def test_merging():
    assert merged([Span(0, 2), Span(2, 2), Span(2, 5), Span(6, 7), Span(3, 4)]) == ((0, 5), (6, 7), (3, 4))


@pytest.mark.parametrize("lengths", [(5, 7), (4, 4, 4, 5), (3, 9)])
def test_documents_that_do_not_fit_rows_are_a_defect(lengths: tuple[int, ...]):
    with pytest.raises(AssertionError):
        ContextLayout.even(size=2, num_rows=2, row_length=6, document_lengths=lengths)


def test_branches_that_cross_rows_are_a_defect():
    with pytest.raises(AssertionError, match="a branch crosses rows"):
        ContextLayout.even(size=2, num_rows=2, row_length=6, document_lengths=(6, 6), document_parents=(-1, 0))
