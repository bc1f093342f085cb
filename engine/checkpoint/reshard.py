"""Resharding: which parts of stored pieces make up a wanted shard, as pure interval arithmetic.

A stored piece is a box: the whole tensor, a run along one dimension, or runs along several. A wanted shard is a
`ShardSpec`. Their intersections give the copies, so that any layout reads any other without either
knowing the other. No files, no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.distributed.sharding import Piece, ShardSpec


@dataclass(frozen=True, slots=True)
class Box:
    """A stored run: global [offset, +length) along `dim`; the whole tensor where `dim` is None.

    Args:
        others: (dimension, offset, length) of further dimensions that it holds a part of.
    """

    dim: int | None = None
    offset: int = 0
    length: int = 0
    others: tuple[tuple[int, int, int], ...] = ()

    def shape(self, global_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the stored piece of a tensor of `global_shape`."""
        return tuple(stop - start for start, stop in self.ranges(global_shape))

    def ranges(self, global_shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """Returns the global (start, stop) of each dimension."""
        whole = [(0, size) for size in global_shape]
        if self.dim is not None:
            for dim, offset, length in ((self.dim, self.offset, self.length), *self.others):
                whole[dim] = (offset, offset + length)
        return tuple(whole)


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy: local[local_slices] = stored[source][source_slices]; both slices have the same shape."""

    source: int
    source_slices: tuple[slice, ...]
    local_slices: tuple[slice, ...]
    num_elements: int


def boxes_of(spec: ShardSpec) -> tuple[tuple[Box, int], ...]:
    """Returns the boxes that a shard consists of, each with its offset in the local tensor along the sharded
    dimension.
    """
    if spec.dim is None:
        return ((Box(), 0),)
    others = tuple(
        (dim, run.global_offset, run.length)
        for dim, size in enumerate(spec.global_shape)
        for run in spec.runs(dim)
        if dim != spec.dim and run.length < size
    )
    return tuple(
        (Box(spec.dim, piece.global_offset, piece.length, others), piece.local_offset) for piece in spec.pieces
    )


def box_spec(global_shape: tuple[int, ...], box: Box) -> ShardSpec:
    """Returns the shard that is exactly `box`, without padding."""
    if box.dim is None:
        return ShardSpec(global_shape=global_shape, local_shape=global_shape)
    return ShardSpec(
        global_shape=global_shape,
        local_shape=box.shape(global_shape),
        dim=box.dim,
        pieces=(Piece(box.offset, 0, box.length),),
        offsets=tuple(0 if dim == box.dim else start for dim, (start, _) in enumerate(box.ranges(global_shape))),
    )


def plan_copies(spec: ShardSpec, stored: Sequence[Box]) -> list[Copy]:
    """Returns the copies that fill the shard `spec` from the pieces `stored` of the same tensor.

    Args:
        spec: the wanted shard; its padding is not part of any copy.
        stored: pieces that cover the whole tensor without overlap.
    """
    copies = [copy for box, local_offset in boxes_of(spec) for copy in _copies_of_box(spec, box, local_offset, stored)]
    wanted = sum(math.prod(box.shape(spec.global_shape)) for box, _ in boxes_of(spec))
    assert sum(copy.num_elements for copy in copies) == wanted, (spec, stored)
    return copies


def _copies_of_box(spec: ShardSpec, wanted: Box, local_offset: int, stored: Sequence[Box]) -> Iterator[Copy]:
    wanted_ranges = wanted.ranges(spec.global_shape)
    for index, piece in enumerate(stored):
        piece_ranges = piece.ranges(spec.global_shape)
        common = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(wanted_ranges, piece_ranges, strict=True)]
        if any(start >= stop for start, stop in common):
            continue
        # A whole-tensor box starts at 0 everywhere; a run starts at its offset along its own dimensions.
        source_slices = tuple(
            slice(start - piece_start, stop - piece_start)
            for (start, stop), (piece_start, _) in zip(common, piece_ranges, strict=True)
        )
        local_slices = tuple(
            slice(start - begin + shift, stop - begin + shift)
            for (start, stop), (begin, _), shift in zip(
                common, wanted_ranges, _shifts(wanted, local_offset, len(common)), strict=True
            )
        )
        yield Copy(index, source_slices, local_slices, math.prod(stop - start for start, stop in common))


def _shifts(box: Box, local_offset: int, num_dims: int) -> list[int]:
    return [local_offset if dim == box.dim else 0 for dim in range(num_dims)]


def find_gap(length: int, runs: Sequence[tuple[int, int]]) -> str | None:
    """Returns why the runs (offset, length) do not tile [0, length) exactly, or None when they do."""
    position = 0
    for offset, size in sorted(runs):
        if offset > position:
            return f"a hole at [{position}, {offset})"
        if offset < position:
            return f"an overlap at {offset}"
        position = offset + size
    return None if position == length else f"an end at {position} instead of {length}"


def find_flaw(global_shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """Returns why the boxes do not tile a tensor of `global_shape` exactly, or None when they do.

    Each box is inside the tensor. Boxes are visited in the order of their first rows, and compared with those that
    reach as
    far: of a tensor that tensor-parallel ranks split in one dimension and data-parallel ranks in another, few do.
    """
    ranges = sorted(box.ranges(global_shape) for box in boxes)
    reaching: list[tuple[tuple[int, int], ...]] = []
    for found in ranges:
        reaching = [other for other in reaching if other[0][1] > found[0][0]]
        for other in reaching:
            if all(a[0] < b[1] and b[0] < a[1] for a, b in zip(found, other, strict=True)):
                return f"an overlap at {[start for start, _ in found]}"
        reaching.append(found)
    missing = math.prod(global_shape) - sum(math.prod(stop - start for start, stop in found) for found in ranges)
    return f"{missing} elements in none of them" if missing else None
