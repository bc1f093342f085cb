"""Writes the fp32 masters into the weights that the model computes with, rounded once.

Where the masters are sharded, every rank rounds its own part and the ranks exchange the rounded parts: they are sent
in the weights' dtype, not fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.distributed.boxes import part_shards
from engine.distributed.collectives import Handle, all_gather_async, all_to_all
from engine.distributed.mesh import Axis
from engine.distributed.sharding import ShardSpec
from engine.layers.storage import WeightPlacement
from engine.optim.flat_layout import Bucket, Slot, owned_ranges

PREFETCHED = 2
"""Buckets in flight while another is copied, where all are gathered at once."""


class Publish(Protocol):
    """Writes the masters into the model's weights."""

    def start(self) -> None:
        """Starts an update of the weights after the masters changed; it ends no later than their next read."""

    def finish(self) -> None:
        """Waits until all weights are up to date."""


class CopyPublish:
    """Copies, where each rank has all masters.

    Args:
        slots: of `master`.
        weights: where each slot's weights are written.
    """

    def __init__(self, slots: Sequence[Slot], master: Tensor, weights: Sequence[Tensor]) -> None:
        self._weights = _Targets(weights)
        self._masters = [slot.view(master) for slot in slots]

    def start(self) -> None:
        self._weights.copy_from(self._masters)

    def finish(self) -> None:
        pass


class _GatheredBucket:
    """One bucket's weights, all-gathered before the first forward that reads them."""

    def __init__(self, bucket: Bucket, master: Tensor, axis: Axis, weights: WeightPlacement | None) -> None:
        self._bucket, self._axis = bucket, axis
        self._master = master[bucket.own]
        targets = [target(slot, weights) for slot in bucket.slots]
        self._dtype, self._weights = targets[0].dtype, _Targets(targets)
        self._is_stale = False
        self._in_flight: tuple[Tensor, Tensor, Handle] | None = None
        """This rank's part, which must live until it is sent; the output; and the all-gather's handle."""

    def invalidate(self) -> None:
        """Marks the weights as stale, because the masters have changed."""
        if self._in_flight is not None:  # its result is outdated
            self._in_flight[2].wait()
        self._is_stale, self._in_flight = True, None

    def start(self) -> None:
        if self._is_stale and self._in_flight is None:
            part = self._master.to(self._dtype)
            self._in_flight = (part, *all_gather_async(part, self._axis))

    @torch.no_grad()
    def take(self) -> None:
        if not self._is_stale:
            return
        self.start()
        assert self._in_flight is not None
        _, whole, handle = self._in_flight
        handle.wait()
        self._weights.copy_from([slot.view(whole, self._bucket.start) for slot in self._bucket.slots])
        self._is_stale, self._in_flight = False, None

    def release(self) -> None:
        pass


class AllGatherPublish:
    """All-gathers, where each rank has its part of each bucket's masters, and all weights.

    Args:
        buckets: all of them; the ranks of its axis have one part of each.
        master: this rank's own masters, or their rounded values.
        axes: by name.
        weights: the layers that read a bucket wait for it, so that it is in flight while earlier layers compute; None
            gathers all at once.
    """

    def __init__(
        self, buckets: Sequence[Bucket], master: Tensor, axes: Mapping[str, Axis], weights: WeightPlacement | None
    ) -> None:
        self._weights = weights
        # buckets lie in backward order
        self._gathered = [_GatheredBucket(bucket, master, axes[bucket.data], weights) for bucket in reversed(buckets)]
        if weights is not None:
            for bucket, gathered in zip(reversed(buckets), self._gathered, strict=True):
                weights.attach_arrival([slot.entry.parameter for slot in bucket.slots], gathered)

    def start(self) -> None:
        for bucket in self._gathered:
            bucket.invalidate()
        if self._weights is None:
            self.finish()
        else:
            self._weights.prefetch_first()

    def finish(self) -> None:
        for place, bucket in enumerate(self._gathered):
            for other in self._gathered[place : place + 1 + PREFETCHED]:
                other.start()
            bucket.take()  # the next ones are in flight while this one is copied


class AllToAllPublish:
    """Exchanges parts by all-to-all, where masters and weights are both sharded, but cut at different places.

    A rank's part of the weights has as many elements as its part of the masters, so that it sends and receives about
    one part: far less than an all-gather would.

    Args:
        buckets: all of them; the ranks of its axis have one part of each.
        master: this rank's own masters, or their rounded values.
        axes: by name.
        weights: the ranks that keep each weight. Weights that it does not shard go to every rank.
    """

    def __init__(
        self, buckets: Sequence[Bucket], master: Tensor, axes: Mapping[str, Axis], weights: WeightPlacement
    ) -> None:
        self._weights = weights
        self._exchanges = []
        for name, axis in axes.items():
            if own := [bucket for bucket in buckets if bucket.data == name]:
                self._exchanges.append(_Exchange(own, master, axis, weights))

    @torch.no_grad()
    def start(self) -> None:
        self._weights.drop()  # gathered weights are outdated
        for exchange in self._exchanges:
            exchange.run()

    def finish(self) -> None:
        pass


class _Exchange:
    """The all-to-all among the ranks of one axis; see `AllToAllPublish`."""

    def __init__(self, buckets: Sequence[Bucket], master: Tensor, axis: Axis, weights: WeightPlacement) -> None:
        self._axis = axis
        self._sent: list[Tensor] = []
        targets: list[Tensor] = []
        self._sent_sizes, self._received_sizes = [0] * axis.size, [0] * axis.size
        self._empty, self._dtype = master[:0], buckets[0].slots[0].entry.parameter.dtype
        for source in range(axis.size):
            for keeper in range(axis.size):
                if axis.rank not in (source, keeper):
                    continue
                for run in owned_ranges(buckets, lambda data, source=source: source):
                    first, last = _kept(run.slot, weights, keeper)
                    first, last = max(first, run.first), min(last, run.last)
                    if first >= last:
                        continue
                    if source == axis.rank:
                        begin = run.start + first - run.first
                        self._sent.append(master[begin : begin + last - first])
                        self._sent_sizes[keeper] += last - first
                    if keeper == axis.rank:
                        targets += _targets(run.slot, weights, first, last)
                        self._received_sizes[source] += last - first
        self._shapes, self._targets = [target.shape for target in targets], _Targets(targets)

    def run(self) -> None:
        sent = torch.cat(self._sent) if self._sent else self._empty
        sizes = {"sent": self._sent_sizes, "received": self._received_sizes}
        received = all_to_all(sent.to(self._dtype), self._axis, **sizes)
        parts = received.split([shape.numel() for shape in self._shapes])
        self._targets.copy_from([part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)])


class _Targets:
    """Weights that are copied to together, from sources without gaps.

    Dense ones apart from the others, for torch copies a whole list tensor by tensor where one of it is not dense, as B
    is that lies beside its weight. A rank whose layers train nothing has none, and torch refuses an empty list.

    Args:
        tensors: the weights.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        places = [[place for place, to in enumerate(tensors) if to.is_contiguous() == dense] for dense in (True, False)]
        self._alike = [(own, [tensors[place] for place in own]) for own in places if own]

    def copy_from(self, sources: Sequence[Tensor]) -> None:
        """Copies each source into its weight, and rounds it."""
        for places, targets in self._alike:
            torch._foreach_copy_(targets, [sources[place] for place in places])


def target(slot: Slot, weights: WeightPlacement | None) -> Tensor:
    """Returns the tensor that this rank writes a whole parameter's new weights to."""
    parameter = slot.entry.parameter
    return parameter.data if weights is None else weights.target(parameter)


def runs_of(view: Tensor, first: int, last: int) -> list[Tensor]:
    """Returns views of elements [first, last) of a tensor, in order; rows may lie apart."""
    shape = tuple(view.shape)
    elements = view.untyped_storage().nbytes() // view.element_size()
    memory = view.as_strided((elements,), (1,), 0)
    whole = ShardSpec(global_shape=shape, local_shape=shape)
    shards = part_shards("", whole, first, last, memory, first=view.storage_offset(), stride=view.stride(0))
    return [shard.tensor for shard in shards]


def _kept(slot: Slot, weights: WeightPlacement, rank: int) -> tuple[int, int]:
    """Returns the range of the parameter's elements that `rank` keeps."""
    parameter = slot.entry.parameter
    storage = weights.storage(parameter)
    return (0, slot.size) if storage is None else storage.run(parameter.data, rank)


def _targets(slot: Slot, weights: WeightPlacement, first: int, last: int) -> list[Tensor]:
    """Returns the tensors on this rank that hold elements [first, last) of the parameter, in order."""
    view = slot.entry.parameter.data
    storage = weights.storage(view)
    if storage is None:
        return runs_of(view, first, last)
    whole = ShardSpec(global_shape=tuple(view.shape), local_shape=tuple(view.shape))
    return [shard.tensor for shard in storage.shards("", view, whole, first, last)]
