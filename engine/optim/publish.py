"""From the fp32 masters to the weights that the model computes with, rounded once.

Where the masters are spread over ranks, every rank rounds its own part and the ranks exchange what they rounded: the
numbers that travel are of the weights' dtype, not fp32.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.distributed.collectives import Handle, all_gather_async, all_to_all
from engine.distributed.mesh import Axis
from engine.distributed.parts import part_shards
from engine.distributed.sharding import ShardSpec
from engine.layers.sharded_storage import SpreadWeights
from engine.optim.layout import Bucket, Slot, own_runs

AHEAD = 2
"""Buckets that are on their way while another is copied; each takes memory for all of its weights."""


class Publish(Protocol):
    """Writes the masters, as they are now, into the model's weights."""

    def __call__(self) -> None: ...


class CopyAll:
    """Each rank has all masters."""

    def __init__(self, slots: Sequence[Slot], master: Tensor) -> None:
        self._weights = [slot.entry.parameter.data for slot in slots]
        self._masters = [slot.view(master) for slot in slots]

    def __call__(self) -> None:
        if self._weights:
            torch._foreach_copy_(self._weights, self._masters)


class _Arriving(NamedTuple):
    bucket: Bucket
    part: Tensor
    """What this rank sends; it must live until it has left."""
    whole: Tensor
    handle: Handle


class GatherParts:
    """Each rank has its part of each bucket's masters, and all weights.

    Args:
        buckets: all of them; the axis's ranks have one part of each.
        master: this rank's own masters.
        axis: the ranks.
    """

    def __init__(self, buckets: Sequence[Bucket], master: Tensor, axis: Axis) -> None:
        self._master, self._axis = master, axis
        self._buckets = [(bucket, [slot.entry.parameter.data for slot in bucket.slots]) for bucket in buckets]

    def __call__(self) -> None:
        arriving: deque[tuple[list[Tensor], _Arriving]] = deque()
        for bucket, weights in self._buckets:
            part = self._master[bucket.own(self._axis.size)].to(weights[0].dtype)
            arriving.append((weights, _Arriving(bucket, part, *all_gather_async(part, self._axis))))
            if len(arriving) > AHEAD:
                self._take(*arriving.popleft())
        while arriving:
            self._take(*arriving.popleft())

    @staticmethod
    def _take(weights: list[Tensor], arrived: _Arriving) -> None:
        arrived.handle.wait()  # hidden by the copies of the bucket before, and its collective by that of the next
        bucket = arrived.bucket
        torch._foreach_copy_(weights, [slot.view(arrived.whole, bucket.start) for slot in bucket.slots])


class SendToKeepers:
    """Each rank has its part of the masters, and its part of the weights, which are cut elsewhere.

    A part of the weights is as many elements as a part of the masters, so that a rank sends and receives about one
    part: far less than a gather would bring.

    Args:
        buckets: all of them; the ranks have one part of each.
        master: this rank's own masters.
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
    def __call__(self) -> None:
        self._weights.drop()  # what has been gathered is of the weights before
        sent = torch.cat(self._sent) if self._sent else self._master[:0]
        sizes = {"sent": self._sent_sizes, "received": self._received_sizes}
        received = all_to_all(sent.to(self._dtype), self._weights.axis, **sizes)
        parts = received.split([target.numel() for target in self._targets])
        torch._foreach_copy_(
            self._targets, [part.view(target.shape) for part, target in zip(parts, self._targets, strict=True)]
        )


def _kept(slot: Slot, weights: SpreadWeights, rank: int) -> tuple[int, int]:
    """Which elements of the parameter `rank` keeps."""
    parameter = slot.entry.parameter
    storage = weights.storage(parameter)
    return (0, slot.size) if storage is None else storage.run(parameter.data, rank)


def _targets(slot: Slot, weights: SpreadWeights, first: int, last: int) -> list[Tensor]:
    """Where elements [first, last) of the parameter lie on this rank: a few tensors, in that order."""
    view = slot.entry.parameter.data
    whole = ShardSpec(global_shape=tuple(view.shape), local_shape=tuple(view.shape))
    storage = weights.storage(view)
    if storage is None:
        shards = part_shards("", whole, first, last, view.view(-1), first=0)
    else:
        shards = storage.shards("", view, whole, first, last)
    return [shard.tensor for shard in shards]
