"""Whole tensors that are spread over the ranks of a run: gathered on rank 0, and read from there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import cast

import torch
from torch import Tensor

from engine.checkpoint.held_tensors import HeldTensors
from engine.checkpoint.reshard import boxes_of
from engine.distributed.collectives import all_reduce, broadcast_async, gather_objects
from engine.distributed.sharding import NamedShard
from engine.training.build import Training
from engine.training.state import once

_BUCKET = 16 << 20
"""Elements that are summed together."""


def whole_shapes(training: Training, shards: Sequence[NamedShard]) -> dict[str, tuple[int, ...]]:
    """Returns the names and global shapes of the tensors of which any rank has a part, the same on all ranks.
    Collective."""
    own = {shard.name: shard.spec.global_shape for shard in shards}
    shapes: dict[str, tuple[int, ...]] = {}
    for one in cast(list[dict[str, tuple[int, ...]]], gather_objects(own, training.mesh.world)):
        shapes |= one
    return shapes


def gather_whole(training: Training, shards: Sequence[NamedShard]) -> dict[str, Tensor]:
    """Returns whole tensors in host memory; nothing on ranks other than 0. Collective.

    Each element is on one rank that saves it, and 0 on all others. The bits are added as whole numbers, so that the
    sum is exact.

    Args:
        training: the run.
        shards: this rank's parts of float32 tensors that training changes, or of their moments.
    """
    world, device = training.mesh.world, training.stages.step.device
    shapes = whole_shapes(training, shards)
    held = once(training, shards)
    if world.size == 1 and all(tuple(one.tensor.shape) == shapes[one.name] for one in held):
        return {shard.name: shard.tensor.detach().cpu().contiguous() for shard in held}
    found: dict[str, Tensor] = {}
    for names in _buckets(shapes):
        sizes = [prod(shapes[name]) for name in names]
        summed = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        parts = summed.split(sizes)
        views = {name: part.view(shapes[name]) for name, part in zip(names, parts, strict=True)}
        for name, tensor, spec in held:
            if name not in views:
                continue
            for box, first in boxes_of(spec):
                piece = tensor if box.dim is None else tensor.narrow(box.dim, first, box.length)
                place = tuple(slice(start, stop) for start, stop in box.ranges(spec.global_shape))
                views[name][place].copy_(piece)
        all_reduce(summed.view(torch.int32), world)
        if training.mesh.is_writer:
            found |= {name: view.cpu() for name, view in views.items()}
    return found


def read_whole(training: Training, shards: Sequence[NamedShard], whole: Mapping[str, Tensor]) -> None:
    """Copies this rank's parts from tensors that rank 0 has; padding is zeroed. Collective.

    Args:
        training: the run.
        shards: this rank's parts of float32 tensors.
        whole: on rank 0, those of `whole_shapes` at least, with these shapes; not read elsewhere.
    """
    world, device = training.mesh.world, training.stages.step.device
    own = {shard.name: shard for shard in shards}
    for name, shape in whole_shapes(training, shards).items():
        if training.mesh.is_writer:
            tensor = whole[name].to(device=device, dtype=torch.float32).contiguous()
        else:
            tensor = torch.empty(shape, dtype=torch.float32, device=device)
        broadcast_async(tensor, world, 0)[1].wait()
        if name in own:
            HeldTensors({name: tensor}, "rank 0").read(name, own[name].spec, out=own[name].tensor)


def _buckets(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[list[str]]:
    names: list[str] = []
    count = 0
    for name, shape in shapes.items():
        if names and count + prod(shape) > _BUCKET:
            yield names
            names, count = [], 0
        names.append(name)
        count += prod(shape)
    if names:
        yield names
