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

from engine.distributed.collectives import Handle, all_gather_async
from engine.distributed.mesh import Axis
from engine.optim.layout import Bucket, Slot

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
