"""A contiguous run of a rank's tensor, as boxes of the whole tensor.

What is spread evenly over ranks element by element (the optimizer's state, the memory of weights) is cut where the
arithmetic falls, inside a parameter and inside a row. Such a part is at most a partial row, whole rows and another
partial row, and each of them is a `NamedShard` like any other: checkpoints, loaders and initialisation see shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from engine.distributed.sharding import NamedShard, Piece, ShardSpec


def part_shards(
    name: str, spec: ShardSpec, start: int, stop: int, memory: Tensor, *, first: int, stride: int | None = None
) -> list[NamedShard]:
    """Elements [start, stop) of a rank's tensor, in row-major order, as shards that are views of `memory`.

    Args:
        name, spec: of the rank's tensor, which has one or two dimensions.
        start, stop: the run; it may be empty. Padding inside it belongs to no shard.
        memory: 1-dimensional, holds the elements.
        first: where in `memory` the tensor's first element lies, or would lie: it may be negative.
        stride: elements between the beginnings of two rows in `memory`; None for dense rows.
    """
    shape = spec.local_shape
    if len(shape) == 1:
        boxes = [((start, stop), (0, 1))] if start < stop else []
    else:
        boxes = list(_boxes(start, stop, shape[1]))
    stride = shape[-1] if stride is None else stride
    shards = []
    for rows, columns in boxes:
        for row in _common(spec, 0, rows):
            if len(shape) == 1:
                view = memory.narrow(0, first + row.local_offset, row.length)
                shards.append(NamedShard(name, view, _part_spec(spec, (row,))))
                continue
            for column in _common(spec, 1, columns):
                at = memory.storage_offset() + first + row.local_offset * stride + column.local_offset
                view = memory.as_strided((row.length, column.length), (stride, 1), at)
                shards.append(NamedShard(name, view, _part_spec(spec, (row, column))))
    return shards


def _boxes(start: int, stop: int, width: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Rows and columns of up to three boxes that make up the run."""
    if start >= stop:
        return
    (first, left), (last, right) = divmod(start, width), divmod(stop, width)
    if first == last:
        yield (first, first + 1), (left, right)
        return
    if left:
        yield (first, first + 1), (left, width)
        first += 1
    if first < last:
        yield (first, last), (0, width)
    if right:
        yield (last, last + 1), (0, right)


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
