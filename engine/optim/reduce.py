"""Gradient reduction: over data-parallel ranks in buckets while backward runs, over tensor-parallel ranks in one piece.

During the last micro-batch's backward each parameter reports when its gradient is complete; a bucket whose parameters
have all reported is sent off at once. Buckets leave in a fixed order, the same on every rank. With several pipeline
stages on a rank, each stage's parameters report during the last backward of their own stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor

from engine.distributed.collectives import Handle, all_reduce, all_reduce_async
from engine.distributed.mesh import Mesh
from engine.layers.module import ShardEntry
from engine.optim.flat import FlatParameters, Region, Slot


@dataclass(slots=True)
class Bucket:
    """flat[start : stop] and how many contributions are still missing."""

    start: int
    stop: int
    slots: list[Slot] = field(default_factory=list)
    missing: int = 0
    handle: Handle | None = None


def plan_buckets(regions: tuple[Region, ...], bucket_elements: int) -> list[Bucket]:
    """Cuts each region into buckets of at least `bucket_elements` (the last one may be smaller)."""
    buckets: list[Bucket] = []
    for region in regions:
        current: Bucket | None = None
        for slot, after in zip(region.slots, (*region.slots[1:], None), strict=True):
            if current is None:
                current = Bucket(start=slot.offset, stop=slot.offset)
                buckets.append(current)
            current.slots.append(slot)
            current.stop = after.offset if after is not None else region.stop
            if current.stop - current.start >= bucket_elements:
                current = None
    return buckets


class GradientReducer:
    """Binds the parameters' gradient sinks to the flat buffer and sums it over the mesh.

    Args:
        flat: the buffers.
        mesh: axes of this rank.
        bucket_bytes: size of a data-parallel bucket.
    """

    def __init__(self, flat: FlatParameters, mesh: Mesh, *, bucket_bytes: int) -> None:
        self._flat, self._mesh = flat, mesh
        self._buckets = plan_buckets(flat.regions, max(1, bucket_bytes // 4))
        place = {id(slot.entry): index for index, slot in enumerate(flat.slots)}
        # a bucket is complete when its last slot in backward order is
        self._buckets.sort(key=lambda bucket: max(place[id(slot.entry)] for slot in bucket.slots))
        self._next = 0
        self._armed: set[int] = set()
        for bucket in self._buckets:
            for slot in bucket.slots:
                assert slot.entry.sink is not None
                slot.entry.sink.bind(slot.view(flat.gradient), self._reporter(bucket, id(slot.entry.sink)))
        self._begin()

    def _reporter(self, bucket: Bucket, sink: int) -> Callable[[], None]:
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
        """Call before the last micro-batch's backward of these parameters: complete buckets are sent from now on."""
        self._armed.update(id(entry.sink) for entry in entries if entry.sink is not None)

    def _launch(self, *, force: bool) -> None:
        while self._next < len(self._buckets) and (force or self._buckets[self._next].missing <= 0):
            bucket = self._buckets[self._next]
            _, bucket.handle = all_reduce_async(self._flat.gradient[bucket.start : bucket.stop], self._mesh.dp_cp)
            self._next += 1

    def finish(self) -> None:
        """Sends what is left, waits for all of it, then completes the sums over model-parallel groups."""
        self._launch(force=True)
        for bucket in self._buckets:
            if bucket.handle is not None:
                bucket.handle.wait()
                bucket.handle = None
        self._begin()
        for group in ("tp", "kv_replica", "pp_ends"):
            if (span := self._flat.span(group)) is not None:
                all_reduce(self._flat.gradient[span[0] : span[1]], self._mesh.axis(group))


def plain_square_sum(values: Tensor) -> Tensor:
    """0-dim sum of squares by torch."""
    return values.square().sum()


def gradient_norm(
    flat: FlatParameters, mesh: Mesh, square_sum: Callable[[Tensor], Tensor] = plain_square_sum
) -> Tensor:
    """0-dim fp32 L2 norm of the whole model's gradient, every parameter counted once, equal on all ranks.

    Args:
        flat: holds the summed gradient.
        mesh: axes of this rank.
        square_sum: 0-dim fp32 sum of the squares of a slice.
    """
    total = flat.gradient.new_zeros(())
    for region in flat.regions:
        if region.owner:
            total = total + square_sum(flat.gradient[region.start : region.stop])
    total = all_reduce(total, mesh.tp)
    return all_reduce(total, mesh.pp).sqrt()
