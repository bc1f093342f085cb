"""A contiguous run of a rank's tensor, as boxes of the whole tensor.

Tensors spread evenly over ranks element by element (the optimizer's state, the memory of weights) are cut where the
arithmetic falls, inside a parameter and inside a row. Such a part of a matrix is at most a partial row, whole rows and
another partial row, and each of them is a `NamedShard` like any other: checkpoints, loaders and initialisation see
shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import prod

from torch import Tensor

from engine.distributed.sharding import NamedShard, Piece, ShardSpec


def part_shards(
    name: str, spec: ShardSpec, start: int, stop: int, memory: Tensor, *, first: int, stride: int | None = None
) -> list[NamedShard]:
    """Elements [start, stop) of a rank's tensor, in row-major order, as shards that are views of `memory`.

    Args:
        name, spec: of the rank's tensor.
        start, stop: the run; it may be empty. Padding inside it belongs to no shard.
        memory: 1-dimensional, holds the elements.
        first: where in `memory` the tensor's first element lies, or would lie: it may be negative.
        stride: elements between the beginnings of two rows in `memory`; None for dense rows.
    """
    shape = spec.local_shape
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if stride is not None and len(shape) > 1:
        strides[0] = stride
    shards = []
    for box in _boxes(start, stop, shape):
        for pieces in product(*(list(_common(spec, dim, span)) for dim, span in enumerate(box))):
            place = sum(piece.local_offset * step for piece, step in zip(pieces, strides, strict=True))
            lengths = [piece.length for piece in pieces]
            view = memory.as_strided(lengths, strides, memory.storage_offset() + first + place)
            shards.append(NamedShard(name, view, _part_spec(spec, pieces)))
    return shards


def _boxes(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yields the boxes that make up the run, as ranges along each dimension: up to three for a matrix."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield ((start, stop),)
        return
    width, inner = prod(shape[1:]), shape[1:]
    (first, left), (last, right) = divmod(start, width), divmod(stop, width)
    if left or first == last:
        for rest in _boxes(left, right if first == last else width, inner):
            yield ((first, first + 1), *rest)
        first += 1
    if first < last:
        yield ((first, last), *((0, length) for length in inner))
    if right and first <= last:
        for rest in _boxes(0, right, inner):
            yield ((last, last + 1), *rest)


def _common(spec: ShardSpec, dim: int, local: tuple[int, int]) -> Iterator[Piece]:
    """Returns the part of the local range along `dim` that belongs to the whole tensor."""
    for run in spec.runs(dim):
        start = max(local[0], run.local_offset)
        stop = min(local[1], run.local_offset + run.length)
        if start < stop:
            yield Piece(run.global_offset + start - run.local_offset, start, stop - start)


def _part_spec(spec: ShardSpec, box: tuple[Piece, ...]) -> ShardSpec:
    return replace(
        spec,
        local_shape=tuple(run.length for run in box),
        dim=0,
        pieces=(Piece(box[0].global_offset, 0, box[0].length),),
        offsets=(0, *(run.global_offset for run in box[1:])),
    )
