"""Resharding: which parts of stored pieces make up a wanted shard, as pure interval arithmetic.

A stored piece is a box: the whole tensor, a run along one dimension, or runs along several. A wanted shard is a
`ShardSpec`. Their intersections give the copies, so that any layout reads any other without either
knowing the other. No files, no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from engine.distributed.sharding import Piece, ShardSpec

_MAX_COMPARISONS = 1 << 28
"""Maximum number of pairs of boxes of one tensor that are compared; numpy takes a few seconds for them."""


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

    @classmethod
    def of(cls, ranges: Iterable[Sequence[int]], global_shape: tuple[int, ...]) -> Box:
        """Returns the box with these global (start, stop) of each dimension."""
        runs = [
            (dim, start, stop - start)
            for dim, ((start, stop), size) in enumerate(zip(ranges, global_shape, strict=True))
            if (start, stop) != (0, size)
        ]
        return cls(*runs[0], tuple(runs[1:])) if runs else cls()

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


class BoxColumns(Sequence[Box]):
    """Boxes of one tensor as an array: a large run's checkpoint has millions, too many for an object each.

    Args:
        shape: of the whole tensor.
        ranges: integers [boxes, dimensions, 2]: where each box begins and ends in each dimension.
    """

    def __init__(self, shape: tuple[int, ...], ranges: NDArray[Any]) -> None:
        assert ranges.shape[1:] == (len(shape), 2), (shape, ranges.shape)
        self.shape, self.ranges = shape, ranges

    @classmethod
    def of(cls, shape: tuple[int, ...], boxes: Iterable[Box]) -> BoxColumns:
        """Returns the columns of `boxes`."""
        ranges = [box.ranges(shape) for box in boxes]
        return cls(shape, np.array(ranges, dtype=np.int64).reshape(len(ranges), len(shape), 2))

    def __len__(self) -> int:
        return len(self.ranges)

    @overload
    def __getitem__(self, index: int) -> Box: ...
    @overload
    def __getitem__(self, index: slice) -> BoxColumns: ...
    def __getitem__(self, index: int | slice) -> Box | BoxColumns:
        if isinstance(index, slice):
            return BoxColumns(self.shape, self.ranges[index])
        return Box.of(self.ranges[index].tolist(), self.shape)

    def touching(self, ranges: tuple[tuple[int, int], ...]) -> list[int]:
        """Returns the places of the boxes that share an element with the box of these ranges, ascending."""
        wanted = np.array(ranges, dtype=np.int64).reshape(-1, 2)
        meets = (self.ranges[..., 0] < wanted[:, 1]) & (wanted[:, 0] < self.ranges[..., 1])
        return [int(place) for place in np.flatnonzero(meets.all(axis=1))]

    def num_elements(self) -> NDArray[np.int64]:
        """Returns the number of elements of each box."""
        lengths = self.ranges[..., 1].astype(np.int64) - self.ranges[..., 0]
        return np.asarray(lengths.prod(axis=1), dtype=np.int64)


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
    # many pieces come as columns, of which few are looked at
    places = stored.touching(wanted_ranges) if isinstance(stored, BoxColumns) else range(len(stored))
    for index in places:
        piece_ranges = stored[index].ranges(spec.global_shape)
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
    """Returns why the boxes do not tile a tensor of `global_shape`, of one dimension at least, or None when they do.

    Each box is inside the tensor. Boxes are sorted by their first rows, and each is compared with those after it that
    begin before it ends: of a tensor that tensor-parallel ranks split in one dimension and data-parallel ranks in
    another, few do.
    """
    columns = boxes if isinstance(boxes, BoxColumns) else BoxColumns.of(global_shape, boxes)
    flat = columns.ranges.reshape(len(columns), 2 * len(global_shape))
    ranges = columns.ranges[np.lexsort(flat.T[::-1])]
    starts, stops = ranges[..., 0], ranges[..., 1]
    near, after, compared = np.arange(len(ranges)), 0, 0
    while len(near):  # those whose rows reach the box `after` places after them
        after += 1
        near = near[near + after < len(ranges)]
        near = near[starts[near + after, 0] < stops[near, 0]]
        if (compared := compared + len(near)) > _MAX_COMPARISONS:
            return "too many boxes beside each other to compare"
        overlap = ((starts[near] < stops[near + after]) & (starts[near + after] < stops[near])).all(axis=1)
        if overlap.any():
            return f"an overlap at {starts[near[overlap][0] + after].tolist()}"
    missing = math.prod(global_shape) - sum(columns.num_elements().tolist())
    return f"{missing} elements in none of them" if missing else None
