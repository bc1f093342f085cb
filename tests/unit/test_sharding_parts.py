"""Runs of a rank's tensor as boxes of the whole: each element of the run once, in its place, as counting says."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.distributed.boxes import part_shards
from engine.distributed.sharding import ShardSpec, padded_split_spec, replicated_spec, split_spec


@st.composite
def specs(draw: st.DrawFn) -> ShardSpec:
    """One rank's part of a tensor of one or two dimensions: whole, split evenly, or split with padding."""
    size, kind = draw(st.integers(1, 3)), draw(st.sampled_from(["whole", "even", "padded"]))
    rank = draw(st.integers(0, size - 1))
    shape = list(draw(st.lists(st.integers(1, 7), min_size=1, max_size=2)))
    if kind == "whole":
        return replicated_spec(tuple(shape), rank=rank, size=size)
    dim = draw(st.integers(0, len(shape) - 1))
    if kind == "padded":
        return padded_split_spec(tuple(shape), dim, rank=rank, size=size)
    shape[dim] *= size
    return split_spec(tuple(shape), dim, rank=rank, size=size, what="x")


def _local(whole: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    """What the rank holds, padding as 0."""
    local = torch.zeros(spec.local_shape, dtype=whole.dtype)
    if spec.dim is None:
        return local.copy_(whole)
    for piece in spec.pieces:
        source = whole.narrow(spec.dim, piece.global_offset, piece.length)
        local.narrow(spec.dim, piece.local_offset, piece.length).copy_(source)
    return local


@settings(max_examples=300, deadline=None)
@given(specs(), st.integers(0, 5), st.integers(0, 3), st.data())
def test_each_element_of_the_run_is_in_one_shard(spec: ShardSpec, first: int, gap: int, data: st.DataObject) -> None:
    whole = torch.arange(torch.Size(spec.global_shape).numel()).reshape(spec.global_shape) + 1
    local = _local(whole, spec)
    start, stop = sorted((data.draw(st.integers(0, local.numel())), data.draw(st.integers(0, local.numel()))))
    # rows with a gap between them, and the memory itself somewhere in a larger one
    width = local.shape[-1]
    stride = width + (gap if local.dim() > 1 else 0)
    rows = local.numel() // width
    memory = torch.full((3 + first + rows * stride,), -1)[3:]
    memory.as_strided((rows, width), (stride, 1), 3 + first).copy_(local.reshape(rows, width))
    shards = part_shards("x", spec, start, stop, memory, first=first, stride=stride)
    assert len(shards) <= 3 * max(1, len(spec.pieces))
    found = torch.zeros_like(whole)
    for name, tensor, part in shards:
        assert name == "x" and tuple(tensor.shape) == part.local_shape and part.owner == spec.owner
        place = tuple(
            slice(run.global_offset, run.global_offset + run.length) for (run,) in map(part.runs, range(whole.dim()))
        )
        assert not found[place].any(), "twice"
        found[place] = tensor
    in_run = local.flatten()[start:stop]
    assert sorted(found[found > 0].tolist()) == sorted(in_run[in_run > 0].tolist())
    assert torch.equal(found[found > 0], whole[found > 0])


def test_a_run_in_memory_that_begins_inside_the_tensor() -> None:
    spec = replicated_spec((3, 4), rank=0, size=1)
    memory = torch.arange(12)[5:10].clone()
    shards = part_shards("x", spec, 5, 10, memory, first=-5)
    assert [shard.tensor.tolist() for shard in shards] == [[[5, 6, 7]], [[8, 9]]]
    shards[0].tensor.fill_(0)
    assert memory.tolist() == [0, 0, 0, 8, 9], "a shard is no view"
