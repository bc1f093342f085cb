"""A model cut by tensor parallelism and spread over data-parallel ranks, read by any other layout, against slicing.

Pipeline ranks hold whole tensors, so that what a tensor goes through does not depend on them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.checkpoint.reshard import Box, boxes_of, plan_copies
from engine.distributed.boxes import part_shards
from engine.distributed.sharding import NamedShard, ShardSpec
from engine.models.describe import parameter_specs
from tests.distributed.cases import cut, small_config

LAYOUTS = st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 5))
"""Tensor ranks; ranks over which each of their tensors is spread."""


@functools.cache
def _specs(rank: int, size: int) -> dict[str, ShardSpec]:
    """One layer, everything that a layer has: fewer key heads than ranks, biases, norms of heads, an odd vocabulary."""
    config = small_config(num_layers=1, qkv_bias=True, qk_norm=True)
    return parameter_specs(config, tensor_rank=rank, tensor_size=size)


@functools.cache
def _whole(shape: tuple[int, ...]) -> Tensor:
    return (torch.arange(torch.Size(shape).numel()) + 1).reshape(shape)


def _parts(name: str, layout: tuple[int, int], *, filled: bool) -> Iterator[tuple[NamedShard, Tensor, Tensor]]:
    """Shards of all ranks that own some of a tensor, each rank's memory, and what belongs there."""
    tensor, spread = layout
    for rank in range(tensor):
        spec = _specs(rank, tensor)[name]
        if not spec.owner:
            continue
        local = cut(_whole(spec.global_shape), spec).flatten()
        share = -(-len(local) // spread)
        for part in range(spread):
            start, stop = min(part * share, len(local)), min((part + 1) * share, len(local))
            expected = local[start:stop].clone()
            memory = expected.clone() if filled else torch.zeros_like(expected)
            for shard in part_shards(name, spec, start, stop, memory, first=-start):
                yield shard, memory, expected


@given(LAYOUTS, LAYOUTS)
@settings(max_examples=25, deadline=None)
def test_any_layout_gives_any_other(saved: tuple[int, int], wanted: tuple[int, int]):
    for name in _specs(0, 1):
        stored: list[tuple[Box, Tensor]] = []
        for shard, _, _ in _parts(name, saved, filled=True):
            ((box, _),) = boxes_of(shard.spec)
            stored.append((box, shard.tensor))
        filled = []
        for shard, memory, expected in _parts(name, wanted, filled=False):
            for copy in plan_copies(shard.spec, [box for box, _ in stored]):
                shard.tensor[copy.local_slices] = stored[copy.source][1][copy.source_slices]
            filled.append((memory, expected))
        assert filled
        # compared at the end: the shards of one rank share its memory
        assert all(torch.equal(memory, expected) for memory, expected in filled), name
