"""The layout of the flat buffers: where each trainable parameter lies. Arithmetic on offsets, no memory.

Parameters are grouped into regions that need the same treatment, and within a region into buckets that are reduced
together. Where the optimizer is sharded, each bucket is padded so that it divides into equal, aligned parts, and rank r
of the group owns the r-th part of each bucket. The parts of one rank, one after the other, are its *own* buffers:
because every bucket divides evenly, an offset p where a bucket or a region begins is p / size there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from engine.layers.module import ShardEntry

ALIGNMENT = 32
"""Elements; every parameter starts on a 128-byte boundary, and so does every rank's part of a bucket."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """One parameter's place: flat[offset : offset + size]."""

    entry: ShardEntry
    offset: int
    size: int

    def view(self, flat: Tensor, start: int = 0) -> Tensor:
        """Returns the parameter's values in `flat`, which begins at offset `start`."""
        offset = self.offset - start
        return flat[offset : offset + self.size].view(self.entry.spec.local_shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """Slots treated alike, flat[start : stop].

    Args:
        grad_reduce: groups over which the gradients are still partial sums.
        owner: whether this rank counts them in the gradient norm.
        decays: whether weight decay applies; see `decays`.
    """

    start: int
    stop: int
    slots: tuple[Slot, ...]
    grad_reduce: tuple[str, ...]
    owner: bool
    decays: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Slots whose gradients are reduced together, flat[start : stop]."""

    start: int
    stop: int
    slots: tuple[Slot, ...]

    def own(self, size: int) -> slice:
        """Returns the place of a rank's part of the bucket in the rank's own buffers."""
        return slice(self.start // size, self.stop // size)


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnedRange:
    """The part of one parameter that a rank owns: elements [first, last) of the slot, at `start` of its own buffers."""

    slot: Slot
    first: int
    last: int
    start: int

    @property
    def place(self) -> slice:
        return slice(self.start, self.start + self.last - self.first)


def decays(entry: ShardEntry) -> bool:
    """Whether weight decay applies, as in Hugging Face's Trainer: to all but the weights of norms and biases."""
    return len(entry.spec.global_shape) > 1 or entry.name.endswith(".lora_magnitude")


def _region_key(entry: ShardEntry) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """Returns a key that is equal on all ranks for the same parameter; ownership follows from what is replicated."""
    return entry.spec.grad_reduce, entry.spec.replicated, not decays(entry)


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def plan_regions(entries: Sequence[ShardEntry], *, size: int = 1, bucket_elements: int = 0) -> tuple[Region, ...]:
    """Lays the parameters out; inside a region in backward order, so that buckets fill front to back.

    The order is the same on every rank.

    Args:
        entries: trainable ones in forward order.
        size: parts that each bucket must divide into.
        bucket_elements: as for `plan_buckets`; without meaning where `size` is 1.
    """
    groups: dict[tuple[tuple[str, ...], tuple[str, ...], bool], list[ShardEntry]] = {}
    for entry in reversed(entries):
        groups.setdefault(_region_key(entry), []).append(entry)
    regions, offset = [], 0
    for key in sorted(groups):
        start, begin, slots = offset, offset, []
        for place, entry in enumerate(groups[key], 1):
            slots.append(Slot(entry=entry, offset=offset, size=prod(entry.spec.local_shape)))
            offset += _padded(slots[-1].size, ALIGNMENT)
            if size > 1 and (offset - begin >= bucket_elements or place == len(groups[key])):
                begin = offset = begin + _padded(offset - begin, size * ALIGNMENT)
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
    return tuple(regions)


def plan_buckets(regions: Iterable[Region], bucket_elements: int) -> list[Bucket]:
    """Cuts each region into buckets of at least `bucket_elements` (the last one may be smaller)."""
    buckets = []
    for region in regions:
        start, slots = region.start, []
        for slot, after in zip(region.slots, (*region.slots[1:], None), strict=True):
            slots.append(slot)
            stop = after.offset if after is not None else region.stop
            if stop - start >= bucket_elements or after is None:
                buckets.append(Bucket(start=start, stop=stop, slots=tuple(slots)))
                start, slots = stop, []
    return buckets


def owned_ranges(buckets: Iterable[Bucket], *, rank: int, size: int) -> list[OwnedRange]:
    """Returns what rank `rank` of `size` owns, in the order of its own buffers."""
    runs = []
    for bucket in buckets:
        length = (bucket.stop - bucket.start) // size
        begin = bucket.start + rank * length
        for slot in bucket.slots:
            first = max(begin - slot.offset, 0)
            last = min(begin + length - slot.offset, slot.size)
            if first < last:
                start = bucket.start // size + slot.offset + first - begin
                runs.append(OwnedRange(slot=slot, first=first, last=last, start=start))
    return runs
