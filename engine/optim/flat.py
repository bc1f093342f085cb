"""Trainable parameters as flat fp32 buffers: gradients, master weights, and where each parameter lies in them.

Parameters are grouped into regions that need the same treatment (which ranks still have to be summed, who counts them
in the norm, whether they decay), so that each treatment is one operation on one slice. Inside a region they lie in
backward order, so that buckets fill front to back. The order is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from engine.distributed.sharding import NamedShard
from engine.layers.module import ShardEntry

ALIGNMENT = 32
"""Elements; every parameter starts on a 128-byte boundary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """One parameter's place: flat[offset : offset + size]."""

    entry: ShardEntry
    offset: int
    size: int

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.offset : self.offset + self.size].view(self.entry.spec.local_shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """Slots treated alike, flat[start : stop].

    Args:
        grad_reduce: groups over which the gradients are still partial sums.
        owner: whether this rank counts them in the gradient norm.
        decays: whether weight decay applies (matrices do, vectors do not).
    """

    start: int
    stop: int
    slots: tuple[Slot, ...]
    grad_reduce: tuple[str, ...]
    owner: bool
    decays: bool


def _region_key(entry: ShardEntry) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """Equal on all ranks for the same parameter; ownership follows from what is replicated."""
    return entry.spec.grad_reduce, entry.spec.replicated, len(entry.spec.global_shape) < 2


class FlatParameters:
    """Flat gradient and master buffers over the trainable parameters.

    Args:
        entries: of the model, in forward order; frozen ones are passed over.
        device: of the buffers.
    """

    def __init__(self, entries: Iterable[ShardEntry], device: torch.device) -> None:
        trainable = [entry for entry in entries if entry.sink is not None]
        groups: dict[tuple[tuple[str, ...], tuple[str, ...], bool], list[ShardEntry]] = {}
        for entry in reversed(trainable):
            groups.setdefault(_region_key(entry), []).append(entry)
        regions, offset = [], 0
        for key in sorted(groups):
            start, slots = offset, []
            for entry in groups[key]:
                size = prod(entry.spec.local_shape)
                slots.append(Slot(entry=entry, offset=offset, size=size))
                offset += -(-size // ALIGNMENT) * ALIGNMENT
            spec = groups[key][0].spec
            assert all(entry.spec.owner == spec.owner for entry in groups[key]), "ownership differs inside a region"
            regions.append(
                Region(
                    start=start,
                    stop=offset,
                    slots=tuple(slots),
                    grad_reduce=key[0],
                    owner=spec.owner,
                    decays=not key[2],
                )
            )
        self.regions = tuple(regions)
        self.gradient = torch.zeros(offset, dtype=torch.float32, device=device)
        self.master = torch.zeros(offset, dtype=torch.float32, device=device)
        order = {id(entry): place for place, entry in enumerate(reversed(trainable))}
        self.slots = tuple(
            sorted((slot for region in regions for slot in region.slots), key=lambda slot: order[id(slot.entry)])
        )
        """In backward order."""
        self._parameters = [slot.entry.parameter.data for slot in self.slots]
        self._masters = [slot.view(self.master) for slot in self.slots]
        if self.slots:  # a pipeline rank may hold frozen parameters alone
            torch._foreach_copy_(self._masters, self._parameters)

    @property
    def num_elements(self) -> int:
        """Parameters on this rank, alignment excluded."""
        return sum(slot.size for slot in self.slots)

    def publish(self) -> None:
        """Writes the masters into the parameters the model computes with, rounding once."""
        if self.slots:
            torch._foreach_copy_(self._parameters, self._masters)

    def shards(self, prefix: str, flat: Tensor) -> list[NamedShard]:
        """Views of `flat` (the masters, or a state of the optimizer) as named shards `prefix/name`."""
        return [NamedShard(f"{prefix}/{slot.entry.name}", slot.view(flat), slot.entry.spec) for slot in self.slots]

    def master_shards(self) -> list[NamedShard]:
        """The masters under their logical names; fill these, then `publish`."""
        return [NamedShard(slot.entry.name, slot.view(self.master), slot.entry.spec) for slot in self.slots]

    def span(self, group: str) -> tuple[int, int] | None:
        """The contiguous slice that still has to be summed over `group`, or None."""
        held = [region for region in self.regions if group in region.grad_reduce]
        return (held[0].start, held[-1].stop) if held else None
