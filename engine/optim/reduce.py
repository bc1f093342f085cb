"""Gradient reduction: over data-parallel ranks in buckets while backward runs, over tensor-parallel ranks in one piece.

Experts that are spread over other ranks than the rest have their own data-parallel ranks; each bucket names its ranks.
During the last micro-batch's backward each parameter reports when its gradient is complete; a bucket whose parameters
have all reported is reduced at once. Buckets are reduced in a fixed order, the same on every rank. With several
pipeline stages on a rank, each stage's parameters report during the last backward of their own stage.

Where gradients are sharded, a rank gets only the sum of its own part of each bucket. The whole of a bucket then lives
from the first addition of a step until its reduce-scatter ends: with one micro-batch a step a few buckets are alive at
a time, with more of them all are, from the first backward on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from engine.distributed.collectives import Handle, all_reduce, all_reduce_async, reduce_scatter_async
from engine.distributed.mesh import Axis, Mesh
from engine.layers.module import ShardEntry
from engine.optim.flat import FlatParameters
from engine.optim.flat_layout import Bucket, plan_buckets

MAX_IN_FLIGHT = 2
"""Buckets of a sharded gradient whose reduce-scatter may be in flight, with their whole memory, while later ones
fill."""
SQUARED_AT_ONCE = 1 << 24
"""Elements; bounds the memory of a sum of squares."""


class _AllReduced:
    """A bucket whose sum every rank gets."""

    def __init__(self, bucket: Bucket, gradient: Tensor) -> None:
        self.slots, self.data, self.missing = bucket.slots, bucket.data, 0
        self.views = [slot.view(gradient, bucket.start) for slot in bucket.slots]
        """Where the slots' gradients are added up."""
        self._gradient = gradient
        self._handle = Handle()

    def prepare(self) -> None:
        """Makes the memory ready; called before each addition."""

    def launch(self, axis: Axis) -> None:
        _, self._handle = all_reduce_async(self._gradient, axis)

    def finish(self) -> None:
        self._handle.wait()


class _ReduceScattered(_AllReduced):
    """A bucket of whose sum each rank gets its own part; the whole bucket has memory only while it is needed."""

    def __init__(self, bucket: Bucket, own: Tensor) -> None:
        super().__init__(bucket, own.new_empty(bucket.stop - bucket.start))  # views need memory to be made of
        self._own, self._bytes = own, self._gradient.nbytes
        self._free()

    def _free(self) -> None:
        self._gradient.untyped_storage().resize_(0)

    def prepare(self) -> None:
        storage = self._gradient.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self._bytes)
            self._gradient.zero_()

    def launch(self, axis: Axis) -> None:
        self.prepare()  # a step may have added nothing to it
        _, self._handle = reduce_scatter_async(self._gradient, axis, self._own)

    def finish(self) -> None:
        self._handle.wait()
        self._free()


def _summed(bucket: Bucket, flat: FlatParameters) -> _AllReduced:
    if not flat.sharding.shards_gradients:
        return _AllReduced(bucket, flat.gradient[bucket.start : bucket.stop])
    own = flat.gradient[bucket.own]
    # a gradient of which one rank has all the data is whole
    return _AllReduced(bucket, own) if bucket.num_parts == 1 else _ReduceScattered(bucket, own)


class GradientReducer:
    """Binds the parameters' gradient sinks to the flat buffer and sums it over the mesh.

    Args:
        flat: the buffers.
        mesh: axes of this rank.
        bucket_bytes: size of a data-parallel bucket; where the optimizer is sharded, its buckets are taken instead.
    """

    def __init__(self, flat: FlatParameters, mesh: Mesh, *, bucket_bytes: int) -> None:
        self._flat, self._mesh = flat, mesh
        if flat.is_sharded:
            axes = {bucket.data: flat.sharding.axes[bucket.data] for bucket in flat.buckets}
            assert all(axis == mesh.axis(name) for name, axis in axes.items()), (
                "sharded over other ranks than summed over"
            )
        planned = flat.buckets if flat.is_sharded else plan_buckets(flat.regions, max(1, bucket_bytes // 4))
        place = {id(slot.entry): index for index, slot in enumerate(flat.slots)}
        # a bucket is complete when its last slot in backward order is
        planned = sorted(planned, key=lambda bucket: max(place[id(slot.entry)] for slot in bucket.slots))
        self._buckets = [_summed(bucket, flat) for bucket in planned]
        self._in_flight: deque[_AllReduced] = deque()
        self._next = 0
        self._armed: set[int] = set()
        for bucket in self._buckets:
            for slot, view in zip(bucket.slots, bucket.views, strict=True):
                assert slot.entry.sink is not None
                slot.entry.sink.bind(view, self._reporter(bucket, id(slot.entry.sink)), bucket.prepare)
        self._begin()

    def _reporter(self, bucket: _AllReduced, sink: int) -> Callable[[], None]:
        def report() -> None:
            if sink in self._armed:
                bucket.missing -= 1
                self._launch(force=False)

        return report

    def _begin(self) -> None:
        self._next = 0
        self._armed.clear()
        for bucket in self._buckets:
            bucket.missing = sum(slot.entry.sink.uses for slot in bucket.slots if slot.entry.sink is not None)

    def arm(self, entries: Iterable[ShardEntry]) -> None:
        """Call before the last micro-batch's backward of these parameters: from now on complete buckets are reduced."""
        self._armed.update(id(entry.sink) for entry in entries if entry.sink is not None)

    def _launch(self, *, force: bool) -> None:
        while self._next < len(self._buckets) and (force or self._buckets[self._next].missing <= 0):
            bucket = self._buckets[self._next]
            bucket.launch(self._mesh.axis(bucket.data))
            self._in_flight.append(bucket)
            self._next += 1
            # the next bucket needs the memory; the backward of two buckets has hidden this reduction
            if self._flat.sharding.shards_gradients and len(self._in_flight) > MAX_IN_FLIGHT:
                self._in_flight.popleft().finish()

    def finish(self) -> None:
        """Reduces the remaining buckets, waits for all, then completes the sums over model-parallel groups."""
        self._launch(force=True)
        while self._in_flight:
            self._in_flight.popleft().finish()
        self._begin()
        for group in ("tp", "kv_replica", "pp_ends"):
            if (span := self._flat.span(group)) is not None:
                all_reduce(self._flat.gradient[span[0] : span[1]], self._mesh.axis(group))


def plain_square_sum(values: Tensor) -> Tensor:
    """Returns the sum of squares by torch, fp64 0-dim."""
    total = values.new_zeros((), dtype=torch.float64)
    for part in values.split(SQUARED_AT_ONCE):
        # its `dtype` would make the same copy, inside the operation, where a count of storages does not see it
        total += torch.linalg.vector_norm(part.double()).square()
    return total


def gradient_norm(
    flat: FlatParameters, mesh: Mesh, square_sum: Callable[[Tensor], Tensor] = plain_square_sum
) -> Tensor:
    """Returns the L2 norm of the whole model's gradient, fp32 0-dim: every element counted once, equal on all ranks.

    The sum is carried in fp64, so that the norm has the same bits however the elements are spread over ranks, but for
    sums that fall within 1e-15 or so of the middle between two fp32 numbers.

    Args:
        flat: holds the summed gradient.
        mesh: axes of this rank.
        square_sum: 0-dim fp64 sum of the squares of a slice.
    """
    total = _square_sum(flat, mesh, "dp_cp", (mesh.tp,), square_sum)
    if mesh.grid.has_expert_mesh:
        total = total + _square_sum(flat, mesh, "edp", (mesh.experts.tp, mesh.ep), square_sum)
    return all_reduce(total, mesh.pp).sqrt().float()


def _square_sum(
    flat: FlatParameters, mesh: Mesh, data: str, holders: tuple[Axis, ...], square_sum: Callable[[Tensor], Tensor]
) -> Tensor:
    """Returns the sum of squares, on this stage, of the gradients summed over the axis called `data`, fp64 0-dim.

    Args:
        holders: the axes whose ranks hold different parts of it.
    """
    total = flat.gradient.new_zeros((), dtype=torch.float64)
    for span in flat.spans:
        if span.region.data == data and span.region.owner:
            total = total + square_sum(span.gradient)
    if flat.is_sharded:
        total = all_reduce(total, mesh.axis(data))
    for axis in holders:
        total = all_reduce(total, axis)
    return total
