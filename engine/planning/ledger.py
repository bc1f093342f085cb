"""Bytes by purpose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

WEIGHTS = "weights"
ADAPTERS = "adapters"
MASTERS = "masters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
BATCHES = "batches"
ACTIVATIONS = "activations"
LOGITS = "logits"
COMMUNICATION = "collectives"
DECODED = "decoded weights"
TEMPORARY = "temporary"
JUDGES = "reward models"
"""They are in processes of their own, which share a GPU with a rank."""
PARTS = (
    WEIGHTS, ADAPTERS, MASTERS, GRADIENTS, OPTIMIZER, BATCHES, ACTIVATIONS, LOGITS, COMMUNICATION, DECODED, TEMPORARY,
    JUDGES,
)  # fmt: skip
"""The purposes, in the order of reports."""

Parts = Mapping[str, int]
"""Bytes by part; a part that is absent has none."""


def total(parts: Parts) -> int:
    """Returns the bytes of all parts."""
    return sum(parts.values())


def largest_part(parts: Parts) -> str:
    """Returns the part with the most bytes."""
    return max(parts, key=lambda name: parts[name])


def added(*several: Parts) -> dict[str, int]:
    """Returns the sum, part by part."""
    sums = dict.fromkeys(PARTS, 0)
    for parts in several:
        for name, nbytes in parts.items():
            sums[name] += nbytes
    return sums


def times(parts: Parts, count: int) -> dict[str, int]:
    """Returns `count` times each part."""
    return {name: nbytes * count for name, nbytes in parts.items()}


def most(moments: Iterable[Parts]) -> Parts:
    """Returns the one with the most bytes."""
    return max(moments, key=total)


def without(parts: Parts, less: Parts) -> dict[str, int]:
    """Returns parts - less, part by part."""
    return {name: parts.get(name, 0) - less.get(name, 0) for name in PARTS}
