"""A ledger of bytes: what is held, for what, and the most that was held at once.

The formulas of this package write down each tensor of a step when it is made and strike it out when it is freed, in the
order of the code that they describe. The peak is therefore found, not guessed: it is the fullest moment of the ledger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
PARTS = (
    WEIGHTS, ADAPTERS, MASTERS, GRADIENTS, OPTIMIZER, BATCHES, ACTIVATIONS, LOGITS, COMMUNICATION, DECODED, TEMPORARY,
)  # fmt: skip
"""What bytes are held for, in the order of reports."""

Parts = Mapping[str, int]
"""Bytes by part; a part that is absent has none."""


@dataclass(slots=True)
class Block:
    """One tensor's storage. Struck out once; a second time is a defect of the formula."""

    part: str
    nbytes: int
    held: bool = True
    away: bool = False
    """In host memory; its bytes are not held here."""


class Ledger:
    """Bytes held now, and at the fullest moment since the last `mark`."""

    def __init__(self) -> None:
        self._held: dict[str, int] = dict.fromkeys(PARTS, 0)
        self._total = 0
        self._peak_total = 0
        self._peak = dict(self._held)

    def take(self, part: str, nbytes: int) -> Block:
        """A tensor is made."""
        assert nbytes >= 0, (part, nbytes)
        self._held[part] += nbytes
        self._total += nbytes
        if self._total > self._peak_total:
            self._peak_total, self._peak = self._total, dict(self._held)
        return Block(part, nbytes)

    def drop(self, *blocks: Block | None) -> None:
        """Tensors are freed; None, where there was none, is passed over."""
        for block in blocks:
            if block is not None:
                assert block.held and not block.away, block
                block.held = False
                self._held[block.part] -= block.nbytes
                self._total -= block.nbytes

    def touch(self, part: str, nbytes: int) -> None:
        """A tensor is made and freed before anything else happens."""
        self.drop(self.take(part, nbytes))

    def send(self, block: Block) -> None:
        """A tensor goes to host memory."""
        self.drop(block)
        block.held, block.away = True, True

    def fetch(self, block: Block) -> None:
        """A tensor comes back, unless it is here."""
        if block.away:
            self.take(block.part, block.nbytes)
            block.away = False

    def mark(self) -> None:
        """The fullest moment is looked for from now on."""
        self._peak_total, self._peak = self._total, dict(self._held)

    @property
    def held(self) -> Parts:
        """Now."""
        return dict(self._held)

    @property
    def peak(self) -> Parts:
        """At the fullest moment."""
        return dict(self._peak)


def total(parts: Parts) -> int:
    """Bytes of all parts."""
    return sum(parts.values())


def largest_part(parts: Parts) -> str:
    """What most bytes are for."""
    return max(parts, key=lambda name: parts[name])


def added(*several: Parts) -> dict[str, int]:
    """Part by part."""
    return {name: sum(parts.get(name, 0) for parts in several) for name in PARTS}


def without(parts: Parts, less: Parts) -> dict[str, int]:
    """parts - less, part by part."""
    return {name: parts.get(name, 0) - less.get(name, 0) for name in PARTS}
