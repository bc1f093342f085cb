"""Ranks that hold the same weights read each of them once, and send it to the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.checkpoint.loading import load_copies, load_parameters
from engine.checkpoint.model_weights import open_source
from engine.distributed.mesh import Axis
from engine.distributed.sharding import NamedShard, ShardSpec
from engine.models.describe import parameter_specs
from tests.support.spawning import spawn

pytestmark = pytest.mark.distributed


def _shards(folder: Path) -> list[NamedShard]:
    """Rank 1 of two tensor ranks' parts; every other one is a view with gaps, as a weight beside its adapter is."""
    shards = []
    specs = parameter_specs(open_source(folder).model.decoder, tensor_rank=1, tensor_size=2)
    for place, (name, spec) in enumerate(specs.items()):
        wide = torch.full((*spec.local_shape[:-1], spec.local_shape[-1] + 3), -1.0)
        tensor = wide[..., : spec.local_shape[-1]] if place % 2 else torch.full(spec.local_shape, -1.0)
        shards.append(NamedShard(name, tensor, spec))
    return shards


def _load(folder: Path) -> tuple[list[str], list[Tensor], int]:
    source, read = open_source(folder), []
    original = source.read

    def noted(name: str, spec: ShardSpec, out: Tensor | None = None) -> Tensor:
        read.append(name)
        return original(name, spec, out)

    source.read = noted  # type: ignore[method-assign]
    shards, told = _shards(folder), 0

    def advance(count: int) -> None:
        nonlocal told
        told += count

    axis = Axis("dp_cp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    assert load_copies(shards, source, axis, progress=advance) == len(shards)
    return read, [shard.tensor for shard in shards], told


def test_each_tensor_is_read_by_one_rank(tmp_path: Path) -> None:
    from tests.unit.checkpoint_models import tiny_llama  # transformers, which the ranks need not import

    tiny_llama(tmp_path)
    expected = _shards(tmp_path)
    load_parameters(expected, open_source(tmp_path))
    found = spawn(_load, world=3, args=(tmp_path,))
    names = [shard.name for shard in expected]
    assert sorted(name for read, _, _ in found for name in read) == sorted(names)
    assert max(len(read) for read, _, _ in found) - min(len(read) for read, _, _ in found) <= 1
    for _, tensors, told in found:
        for shard, tensor in zip(expected, tensors, strict=True):
            assert torch.equal(tensor, shard.tensor), shard.name
        assert told == sum(tensor.nbytes for tensor in tensors)
