"""Trainable parameters as flat fp32 buffers: gradients, master weights, and where each parameter lies in them.

Each property in which parameters differ (the ranks that a gradient is still summed over, the rank that counts it in the
norm, weight decay, learning rate) is one operation on one slice; `engine.optim.flat_layout` says where everything lies.
With a `Sharding` the masters, and at higher levels the gradient, are only this rank's own part. With `HostMemory` the
masters are kept there; the gradient never is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.distributed.boxes import part_shards
from engine.distributed.sharding import NamedShard
from engine.layers.host_copies import HostMemory
from engine.layers.module import ShardEntry
from engine.optim.flat_layout import OwnedRange, Region, Slot, owned_ranges, plan_buckets, plan_regions, same_rate
from engine.optim.publish import AllGatherPublish, AllToAllPublish, CopyPublish, Publish, target
from engine.optim.state_sharding import Sharding


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A range of the masters that is updated together: masters[start : stop], of one region.

    Args:
        start, stop: in the masters and in buffers laid out like them.
        gradient: the summed gradient of the range; a view that stays valid.
    """

    start: int
    stop: int
    gradient: Tensor
    region: Region


class FlatParameters:
    """Flat gradient and master buffers over the trainable parameters.

    Masters start from the parameters; where these are sharded, from zero: fill them, and publish.

    Args:
        entries: of the model, in forward order; frozen ones are passed over.
        device: of the buffers.
        sharding: which of them are sharded, and over which ranks; None for nothing.
        host: the host memory that keeps masters and optimizer states between updates; None keeps them on the device.
        lr_factor: name of a parameter -> its learning rate as a multiple of the optimizer's.
    """

    def __init__(
        self,
        entries: Iterable[ShardEntry],
        device: torch.device,
        *,
        sharding: Sharding | None = None,
        host: HostMemory | None = None,
        lr_factor: Callable[[str], float] = same_rate,
    ) -> None:
        self.sharding, self.host = sharding or Sharding(), host
        trainable = [entry for entry in entries if entry.sink is not None]
        self.regions = plan_regions(
            trainable,
            num_parts=self.sharding.num_parts if self.is_sharded else None,
            bucket_elements=self.sharding.bucket_elements,
            lr_factor=lr_factor,
        )
        buckets = plan_buckets(self.regions, self.sharding.bucket_elements) if self.is_sharded else []
        self._runs: list[OwnedRange] = owned_ranges(buckets, self.sharding.rank)
        total = self.regions[-1].stop if self.regions else 0
        self._num_own, self._device = (self.regions[-1].own.stop if self.regions else 0), device
        self.master = self.state()
        self.rounded: Tensor | None = None
        """This rank's masters in the weights' dtype, on the device: sent where sharded masters are in host memory."""
        if host is not None and self.is_sharded and trainable:
            self.rounded = torch.zeros(self._num_own, dtype=trainable[0].parameter.dtype, device=device)
        self.gradient = torch.zeros(
            self._num_own if self.sharding.shards_gradients else total, dtype=torch.float32, device=device
        )
        """The sum over all ranks, once it is complete: of everything, or this rank's own part alone."""
        order = {id(entry): place for place, entry in enumerate(reversed(trainable))}
        self.slots = tuple(
            sorted((slot for region in self.regions for slot in region.slots), key=lambda slot: order[id(slot.entry)])
        )
        """The regions' slots in backward order."""
        self.buckets = tuple(buckets)
        """The buckets that divide over their ranks; empty where nothing is sharded."""
        self.spans = tuple(self._make_spans())
        self._publish: Publish
        source = self.master if self.rounded is None else self.rounded
        if not self.is_sharded:
            self._publish = CopyPublish(self.slots, self.master, [self.target(slot) for slot in self.slots])
        elif self._weights_are_sharded:
            assert self.sharding.weights is not None
            self._publish = AllToAllPublish(self.buckets, source, self.sharding.axes, self.sharding.weights)
        else:
            self._publish = AllGatherPublish(self.buckets, source, self.sharding.axes, self.sharding.weights)
        if not self._weights_are_sharded:
            self._start_from_parameters()

    def state(self) -> Tensor:
        """Returns zeros with the masters' layout and placement: fp32, 1-dimensional."""
        if self.host is not None:
            return self.host.zeros(self._num_own, torch.float32)
        return torch.zeros(self._num_own, dtype=torch.float32, device=self._device)

    def target(self, slot: Slot) -> Tensor:
        """Returns the tensor that a parameter's weights are written to, where they are not sharded."""
        return target(slot, self.sharding.weights)

    @property
    def is_sharded(self) -> bool:
        """Whether the masters, and all that lies like them, are this rank's own part."""
        return self.sharding.is_sharded

    @property
    def _weights_are_sharded(self) -> bool:
        return self.sharding.weights is not None and self.sharding.weights.is_sharded

    @property
    def num_elements(self) -> int:
        """The number of parameters on this rank, whichever rank updates them, alignment excluded."""
        return sum(slot.size for slot in self.slots)

    def _make_spans(self) -> Iterable[Span]:
        for region in self.regions:
            own = region.own
            if not self.is_sharded or self.sharding.shards_gradients:
                yield Span(start=own.start, stop=own.stop, gradient=self.gradient[own], region=region)
                continue
            for bucket in self.buckets:  # own parts lie apart in a gradient that is whole
                if region.start <= bucket.start < region.stop:
                    own = bucket.own
                    rank = self.sharding.rank(bucket.data) if bucket.num_parts > 1 else 0
                    begin = bucket.start + rank * (own.stop - own.start)
                    gradient = self.gradient[begin : begin + own.stop - own.start]
                    yield Span(start=own.start, stop=own.stop, gradient=gradient, region=region)

    def _start_from_parameters(self) -> None:
        if not self.is_sharded:
            if self.slots:  # a pipeline rank may hold frozen parameters alone
                masters = [slot.view(self.master) for slot in self.slots]
                torch._foreach_copy_(masters, [self.target(slot) for slot in self.slots])
            return
        for run in self._runs:
            self.master[run.place].copy_(self.target(run.slot).reshape(-1)[run.first : run.last])

    def publish(self) -> None:
        """Writes the masters into the parameters the model computes with, rounding once. Collective where sharded."""
        if self.host is not None:
            self.host.settle()
        if self.rounded is not None:
            self.rounded.copy_(self.master)
        self._publish.start()
        self._publish.finish()

    def publish_async(self) -> None:
        """Publishes as `publish`, with the all-gathers in flight until the next forward reads the parameters.

        Where masters are in host memory, `rounded` holds their new values, rounded.
        """
        self._publish.start()

    def finish_publish(self) -> None:
        """Waits for all weights that `publish_async` has in flight, and gathers those that no forward has asked for.
        Collective."""
        self._publish.finish()

    def shards(self, prefix: str, flat: Tensor) -> list[NamedShard]:
        """Returns views of `flat` (the masters, or a state of the optimizer) as named shards `prefix/name`.

        Where sharded, a parameter is several shards or none: those that this rank owns.
        """
        return self._named(f"{prefix}/", flat)

    def master_shards(self) -> list[NamedShard]:
        """Returns the masters under their logical names; fill these, then `publish`."""
        return self._named("", self.master)

    def gradient_shards(self) -> list[NamedShard]:
        """Returns the summed gradient under the parameters' logical names, as far as this rank has it."""
        if self.sharding.shards_gradients:
            return self._named("", self.gradient)
        return [NamedShard(slot.entry.name, slot.view(self.gradient), slot.entry.spec) for slot in self.slots]

    def _named(self, prefix: str, flat: Tensor) -> list[NamedShard]:
        if self.host is not None:
            self.host.settle()  # the caller will read or write
        if not self.is_sharded:
            return [NamedShard(prefix + slot.entry.name, slot.view(flat), slot.entry.spec) for slot in self.slots]
        shards: list[NamedShard] = []
        for run in self._runs:
            entry = run.slot.entry
            first = run.start - run.first
            shards += part_shards(prefix + entry.name, entry.spec, run.first, run.last, flat, first=first)
        return shards

    def span(self, group: str) -> tuple[int, int] | None:
        """Returns the contiguous slice of the gradient that still has to be summed over `group`, or None."""
        held = [region for region in self.regions if group in region.grad_reduce]
        if not held:
            return None
        if self.sharding.shards_gradients:
            return held[0].own.start, held[-1].own.stop
        return held[0].start, held[-1].stop
