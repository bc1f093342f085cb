"""From the fp32 masters to the weights that the model computes with, rounded once.

Where the masters are spread over ranks, every rank rounds its own part and the ranks exchange what they rounded: the
numbers that travel are of the weights' dtype, not fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.distributed.boxes import part_shards
from engine.distributed.collectives import Handle, all_gather_async, all_to_all
from engine.distributed.mesh import Axis
from engine.distributed.sharding import ShardSpec
from engine.layers.storage import SpreadWeights
from engine.optim.flat_layout import Bucket, Slot, own_runs

AHEAD = 2
"""Buckets that are on their way while another is copied, where all are wanted at once."""


class Publish(Protocol):
    """Writes the masters into the model's weights."""

    def start(self) -> None:
        """The masters have changed: the weights become what they are now, at the latest when they are read next."""

    def finish(self) -> None:
        """Weights that are still to come are there."""


class CopyAll:
    """Each rank has all masters.

    Args:
        slots: of `master`.
        weights: where each slot's weights are written.
    """

    def __init__(self, slots: Sequence[Slot], master: Tensor, weights: Sequence[Tensor]) -> None:
        self._weights = list(weights)
        self._masters = [slot.view(master) for slot in slots]

    def start(self) -> None:
        _copy(self._weights, self._masters)

    def finish(self) -> None:
        pass


class _Arrival:
    """One bucket's weights, gathered by the first forward that reads them."""

    def __init__(self, bucket: Bucket, master: Tensor, axis: Axis, weights: SpreadWeights | None) -> None:
        self._bucket, self._axis = bucket, axis
        self._master = master[bucket.own(axis.size)]
        self.weights = [home(slot, weights) for slot in bucket.slots]
        self._is_due = False
        self._sent: tuple[Tensor, Tensor, Handle] | None = None
        """This rank's part, which must live until it has left; what arrives; and when."""

    def announce(self) -> None:
        """The masters have changed."""
        if self._sent is not None:  # what was on its way is no longer wanted
            self._sent[2].wait()
        self._is_due, self._sent = True, None

    def start(self) -> None:
        if self._is_due and self._sent is None:
            part = self._master.to(self.weights[0].dtype)
            self._sent = (part, *all_gather_async(part, self._axis))

    @torch.no_grad()
    def take(self) -> None:
        if not self._is_due:
            return
        self.start()
        assert self._sent is not None
        _, whole, handle = self._sent
        handle.wait()
        _copy(self.weights, [slot.view(whole, self._bucket.start) for slot in self._bucket.slots])
        self._is_due, self._sent = False, None

    def release(self) -> None:
        pass


class GatherParts:
    """Each rank has its part of each bucket's masters, and all weights.

    Args:
        buckets: all of them; the axis's ranks have one part of each.
        master: this rank's own masters, or what they have been rounded to.
        axis: the ranks.
        weights: their units wait for what they read, so that it travels while those before them compute; None gathers
            all at once.
    """

    def __init__(self, buckets: Sequence[Bucket], master: Tensor, axis: Axis, weights: SpreadWeights | None) -> None:
        self._weights = weights
        # buckets lie in backward order
        self._arrivals = [_Arrival(bucket, master, axis, weights) for bucket in reversed(buckets)]
        if weights is not None:
            for bucket, arrival in zip(reversed(buckets), self._arrivals, strict=True):
                weights.attach_arrival([slot.entry.parameter for slot in bucket.slots], arrival)

    def start(self) -> None:
        for arrival in self._arrivals:
            arrival.announce()
        if self._weights is None:
            self.finish()
        else:
            self._weights.prefetch_first()

    def finish(self) -> None:
        for place, arrival in enumerate(self._arrivals):
            for other in self._arrivals[place : place + 1 + AHEAD]:
                other.start()
            arrival.take()  # the next ones travel while this one is copied


class SendToKeepers:
    """Each rank has its part of the masters, and its part of the weights, which are cut elsewhere.

    A part of the weights is as many elements as a part of the masters, so that a rank sends and receives about one
    part: far less than a gather would bring.

    Args:
        buckets: all of them; the ranks have one part of each.
        master: this rank's own masters, or what they have been rounded to.
        weights: who keeps what. What it does not spread, every rank gets.
    """

    def __init__(self, buckets: Sequence[Bucket], master: Tensor, weights: SpreadWeights) -> None:
        self._master, self._weights, axis = master, weights, weights.axis
        self._sent: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._sent_sizes, self._received_sizes = [0] * axis.size, [0] * axis.size
        self._dtype = buckets[0].slots[0].entry.parameter.dtype if buckets else master.dtype
        for source in range(axis.size):
            for keeper in range(axis.size):
                if axis.rank not in (source, keeper):
                    continue
                for run in own_runs(buckets, rank=source, size=axis.size):
                    first, last = _kept(run.slot, weights, keeper)
                    first, last = max(first, run.first), min(last, run.last)
                    if first >= last:
                        continue
                    if source == axis.rank:
                        begin = run.start + first - run.first
                        self._sent.append(master[begin : begin + last - first])
                        self._sent_sizes[keeper] += last - first
                    if keeper == axis.rank:
                        self._targets += _targets(run.slot, weights, first, last)
                        self._received_sizes[source] += last - first

    @torch.no_grad()
    def start(self) -> None:
        self._weights.drop()  # what has been gathered is of the weights before
        sent = torch.cat(self._sent) if self._sent else self._master[:0]
        sizes = {"sent": self._sent_sizes, "received": self._received_sizes}
        received = all_to_all(sent.to(self._dtype), self._weights.axis, **sizes)
        parts = received.split([target.numel() for target in self._targets])
        _copy(self._targets, [part.view(target.shape) for part, target in zip(parts, self._targets, strict=True)])

    def finish(self) -> None:
        pass


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source into its target; a rank whose layers train nothing has none, which torch refuses."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def home(slot: Slot, weights: SpreadWeights | None) -> Tensor:
    """Where this rank writes a parameter's new weights, all of them."""
    parameter = slot.entry.parameter
    return parameter.data if weights is None else weights.target(parameter)


def runs_of(view: Tensor, first: int, last: int) -> list[Tensor]:
    """Elements [first, last) of a tensor of one or two dimensions, whose rows may lie apart: views of it, in order."""
    shape = tuple(view.shape)
    elements = view.untyped_storage().nbytes() // view.element_size()
    memory = view.as_strided((elements,), (1,), 0)
    whole = ShardSpec(global_shape=shape, local_shape=shape)
    shards = part_shards("", whole, first, last, memory, first=view.storage_offset(), stride=view.stride(0))
    return [shard.tensor for shard in shards]


def _kept(slot: Slot, weights: SpreadWeights, rank: int) -> tuple[int, int]:
    """Which elements of the parameter `rank` keeps."""
    parameter = slot.entry.parameter
    storage = weights.storage(parameter)
    return (0, slot.size) if storage is None else storage.run(parameter.data, rank)


def _targets(slot: Slot, weights: SpreadWeights, first: int, last: int) -> list[Tensor]:
    """Where elements [first, last) of the parameter lie on this rank: a few tensors, in that order."""
    view = slot.entry.parameter.data
    storage = weights.storage(view)
    if storage is None:
        return runs_of(view, first, last)
    whole = ShardSpec(global_shape=tuple(view.shape), local_shape=tuple(view.shape))
    return [shard.tensor for shard in storage.shards("", view, whole, first, last)]
