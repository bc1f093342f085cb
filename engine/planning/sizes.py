"""Sizes that are the same wherever a rank computes: of its tokens, its numbers and its backend."""

from __future__ import annotations

from dataclasses import dataclass

from engine.planning.kernels import KernelMemory

WIDE = 4
"""Bytes of statistics, and of what norms and losses are computed in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What is the same for all layers of a rank.

    Args:
        tokens: of a micro-batch, after context parallelism.
        local: of those, tokens of this rank between the linears: fewer with sequence parallelism.
        itemsize: bytes of a number in the model's dtype.
        kernels: the backend.
        row_length: tokens of the longest document.
        ranks: of the tensor axis.
        answers: of a micro-batch, where the objective compares them.
    """

    tokens: int
    local: int
    itemsize: int
    kernels: KernelMemory
    row_length: int
    ranks: int = 1
    answers: int = 0

    @property
    def splits(self) -> bool:
        """Whether tokens are split over the tensor ranks."""
        return self.local != self.tokens

    def numbers(self, rows: int, features: int) -> int:
        """Bytes of [rows, features] in the model's dtype."""
        return rows * features * self.itemsize

    @property
    def is_wide(self) -> bool:
        """Whether the model computes in the dtype of statistics."""
        return self.itemsize >= WIDE
