"""The layout of the flat buffers: where each trainable parameter lies. Arithmetic on offsets, no memory.

Parameters are grouped into regions that need the same treatment, and within a region into buckets that are reduced
together. Where the optimizer is sharded, each bucket is padded so that it divides into equal, aligned parts, and rank r
of the data-parallel ranks (of the experts' own, for experts) owns the r-th part of each bucket. The parts of one rank,
one after the other, are its *own* buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

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
class Bucket:
    """Slots whose gradients are reduced together, flat[start : stop].

    Args:
        data: name of the axis over which the gradients are summed, see `ShardSpec.data`.
        num_parts: parts into which it divides, one a rank of that axis; 1 where it is not sharded.
        own_start: where the part of a rank begins in the rank's own buffers.
    """

    start: int
    stop: int
    slots: tuple[Slot, ...]
    data: str = "dp_cp"
    num_parts: int = 1
    own_start: int = 0

    @property
    def own(self) -> slice:
        """The place of a rank's part in the rank's own buffers."""
        return slice(self.own_start, self.own_start + (self.stop - self.start) // self.num_parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Region(Bucket):
    """Buckets, one after the other, whose slots are treated alike.

    Args:
        grad_reduce: groups over which the gradients are still partial sums.
        owner: whether this rank counts them in the gradient norm.
        decays: whether weight decay applies; see `decays`.
        lr_factor: their learning rate as a multiple of the optimizer's.
    """

    grad_reduce: tuple[str, ...]
    owner: bool
    decays: bool
    lr_factor: float = 1.0


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


_DECAYED_VECTORS = (
    ".lora_magnitude", ".sinks.weight", ".class_embedding", ".image_newline.weight", ".lambda_1", ".lambda_2",
)  # fmt: skip
"""Endings of the names of vectors that are neither a norm's weights nor a bias; the last two scale a tower's layers."""


def decays(entry: ShardEntry) -> bool:
    """Returns whether weight decay applies, as in Hugging Face's Trainer: to all but the weights of norms and
    biases."""
    if entry.decays is not None:
        return entry.decays
    return len(entry.spec.global_shape) > 1 or entry.name.endswith(_DECAYED_VECTORS)


class _Kind(NamedTuple):
    """The common properties of the parameters of a region, equal on all ranks; ownership follows from
    `replicated`."""

    grad_reduce: tuple[str, ...]
    replicated: tuple[str, ...]
    data: str
    no_decay: bool
    lr_factor: float


def same_rate(name: str) -> float:
    """Returns the factor of every learning rate where all parameters have the optimizer's."""
    return 1.0


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def plan_regions(
    entries: Sequence[ShardEntry],
    *,
    num_parts: Mapping[str, int] | None = None,
    bucket_elements: int = 0,
    lr_factor: Callable[[str], float] = same_rate,
) -> tuple[Region, ...]:
    """Lays the parameters out; inside a region in backward order, so that buckets fill front to back.

    The order is the same on every rank.

    Args:
        entries: trainable ones in forward order.
        num_parts: parts that each bucket must divide into, by the axis that its gradients are summed over; None where
            nothing is sharded.
        bucket_elements: as for `plan_buckets`; without meaning where nothing is sharded.
        lr_factor: name of a parameter -> its learning rate as a multiple of the optimizer's.
    """
    groups: dict[_Kind, list[ShardEntry]] = {}
    for entry in reversed(entries):
        spec = entry.spec
        kind = _Kind(spec.grad_reduce, spec.replicated, spec.data, not decays(entry), lr_factor(entry.name))
        groups.setdefault(kind, []).append(entry)
    regions, offset, own = [], 0, 0
    for kind in sorted(groups):
        start, begin, slots = offset, offset, []
        size = 1 if num_parts is None else num_parts[kind.data]
        for place, entry in enumerate(groups[kind], 1):
            slots.append(Slot(entry=entry, offset=offset, size=prod(entry.spec.local_shape)))
            offset += _padded(slots[-1].size, ALIGNMENT)
            if num_parts is not None and (offset - begin >= bucket_elements or place == len(groups[kind])):
                begin = offset = begin + _padded(offset - begin, size * ALIGNMENT)
        spec = groups[kind][0].spec
        assert all(entry.spec.owner == spec.owner for entry in groups[kind]), "ownership differs inside a region"
        regions.append(
            Region(
                start=start,
                stop=offset,
                slots=tuple(slots),
                grad_reduce=kind.grad_reduce,
                owner=spec.owner,
                decays=not kind.no_decay,
                lr_factor=kind.lr_factor,
                data=kind.data,
                num_parts=size,
                own_start=own,
            )
        )
        own = regions[-1].own.stop
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
                own = region.own_start + (start - region.start) // region.num_parts
                buckets.append(
                    Bucket(
                        start=start,
                        stop=stop,
                        slots=tuple(slots),
                        data=region.data,
                        num_parts=region.num_parts,
                        own_start=own,
                    )
                )
                start, slots = stop, []
    return buckets


def owned_ranges(buckets: Iterable[Bucket], rank: Callable[[str], int]) -> list[OwnedRange]:
    """Returns the boxes that a rank owns, in the order of its own buffers.

    Args:
        buckets: all, or some of them.
        rank: name of an axis -> the rank's place on it.
    """
    runs = []
    for bucket in buckets:
        length = (bucket.stop - bucket.start) // bucket.num_parts
        begin = bucket.start + (rank(bucket.data) * length if bucket.num_parts > 1 else 0)
        for slot in bucket.slots:
            first = max(begin - slot.offset, 0)
            last = min(begin + length - slot.offset, slot.size)
            if first < last:
                start = bucket.own_start + slot.offset + first - begin
                runs.append(OwnedRange(slot=slot, first=first, last=last, start=start))
    return runs
