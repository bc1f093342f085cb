"""Buckets: every element in one, in one region, sent when all its parameters have reported, in a fixed order."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import engine.optim.reduce as reduce
from engine.distributed.collectives import Handle
from engine.distributed.mesh import Axis, single_process_mesh
from engine.distributed.sharding import replicated_spec
from engine.layers.module import ShardEntry
from engine.ops.gradients import GradientSink
from engine.optim.flat import FlatParameters
from engine.optim.flat_layout import plan_buckets
from engine.optim.reduce import GradientReducer

CPU = torch.device("cpu")


def _flat(shapes: list[tuple[tuple[int, ...], bool]]) -> FlatParameters:
    """Parameters of the given shapes; True where the gradient is a partial sum over tp."""
    entries = []
    for place, (shape, partial) in enumerate(shapes):
        spec = replicated_spec(shape, rank=0, size=2, grad_reduce=("tp",) if partial else ())
        sink = GradientSink(torch.Size(shape), CPU)
        entries.append(ShardEntry(f"p{place}", nn.Parameter(torch.zeros(shape)), spec, sink))
    return FlatParameters(entries, CPU)


SHAPES = st.lists(
    st.tuples(
        st.one_of(st.tuples(st.integers(1, 90)), st.tuples(st.integers(1, 9), st.integers(1, 40))), st.booleans()
    ),
    min_size=1,
    max_size=12,
)


@given(shapes=SHAPES, size=st.integers(1, 500))
@settings(max_examples=60, deadline=None)
def test_buckets_tile_the_regions(shapes: list[tuple[tuple[int, ...], bool]], size: int):
    flat = _flat(shapes)
    buckets = plan_buckets(flat.regions, size)
    edges = [(bucket.start, bucket.stop) for bucket in buckets]
    assert edges[0][0] == 0 and edges[-1][1] == flat.gradient.numel()
    assert all(before[1] == after[0] for before, after in itertools.pairwise(edges))
    assert sorted(slot.offset for bucket in buckets for slot in bucket.slots) == sorted(
        slot.offset for slot in flat.slots
    )
    ends = {region.stop for region in flat.regions}
    for bucket in buckets:
        assert bucket.stop - bucket.start >= size or bucket.stop in ends
        assert all(bucket.start <= slot.offset and slot.offset + slot.size <= bucket.stop for slot in bucket.slots)
        assert len({slot.entry.spec.grad_reduce for slot in bucket.slots}) == 1


@given(shapes=SHAPES)
@settings(max_examples=30, deadline=None)
def test_partial_sums_lie_together(shapes: list[tuple[tuple[int, ...], bool]]):
    flat = _flat(shapes)
    span = flat.span("tp")
    partial = {f"p{place}" for place, (_, is_partial) in enumerate(shapes) if is_partial}
    if span is None:
        assert not partial
        return
    inside = {slot.entry.name for slot in flat.slots if span[0] <= slot.offset < span[1]}
    assert inside == partial
    assert flat.span("kv_replica") is None


@pytest.mark.parametrize("seed", range(4))
def test_buckets_leave_when_complete_and_in_the_same_order(seed: int, monkeypatch: pytest.MonkeyPatch):
    sent: list[tuple[int, int]] = []
    flat = _flat([((10, 7), False), ((30,), True), ((4, 40), True), ((64,), False), ((9, 9), False), ((5, 5), True)])
    base = flat.gradient.data_ptr()

    def record(tensor: Tensor, axis: Axis) -> tuple[Tensor, Handle]:
        start = (tensor.data_ptr() - base) // 4
        sent.append((start, start + tensor.numel()))
        assert (tensor != 0).any(), "sent before anything was added"
        return tensor, Handle()

    monkeypatch.setattr(reduce, "all_reduce_async", record)
    flat.slots[2].entry.sink.uses = 2
    reducer = GradientReducer(flat, single_process_mesh(), bucket_bytes=400)
    order = [slot for slot in flat.slots for _ in range(slot.entry.sink.uses)]
    random.Random(seed).shuffle(order)
    for slot in order:
        slot.entry.sink.add(torch.ones(slot.entry.sink.shape))
    assert sent == [], "an earlier micro-batch was sent"
    reducer.arm(slot.entry for slot in flat.slots)
    missing = {id(slot): slot.entry.sink.uses for slot in flat.slots}
    for slot in order:
        slot.entry.sink.add(torch.ones(slot.entry.sink.shape))
        missing[id(slot)] -= 1
        for start, stop in sent:
            late = [other for other in flat.slots if start <= other.offset < stop and missing[id(other)]]
            assert not late, "sent before it was complete"
    assert len(sent) == len(plan_buckets(flat.regions, 100)), "complete buckets were kept back"
    in_order = sent.copy()
    reducer.finish()
    assert sent == in_order
    sent.clear()
    reducer.arm(slot.entry for slot in flat.slots)
    reducer.finish()
    assert sent == in_order, "the order depends on who reported"
    uses = torch.zeros_like(flat.gradient)
    for slot in flat.slots:
        slot.view(uses).fill_(2.0 * slot.entry.sink.uses)
    assert torch.equal(flat.gradient, uses)
