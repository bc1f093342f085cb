"""Fingerprints of tensors, computed on their device over the bits.

The sum, modulo 2^64, of bits[r, c] * row[r] * column[c], where row and column are odd 64-bit numbers that depend on the
place alone. An odd number can be divided by modulo 2^64, so that one element that differs always shows; several
differences cancel with a probability of about 2^-32 at most. Integers add up in any order, so that the
fingerprint of given bits is one number on every device. It is no protection against deliberate collisions.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

AT_ONCE = 1 << 21
"""Elements; bounds the memory of a fingerprint to 16 MiB or so."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROWS_BEGIN = 1 << 40


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _odd_numbers(first: int, count: int, device: torch.device) -> Tensor:
    """Returns int64 [count]: SplitMix64's mixing of `first`, `first` + 1, .., made odd."""
    mixed = (torch.arange(first, first + count, dtype=torch.int64, device=device) + 1) * _signed(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> 27)) * _signed(0x94D049BB133111EB)
    return (mixed ^ (mixed >> 31)) | 1


class Fingerprints:
    """Makes fingerprints; keeps the multipliers.

    Args:
        device: of the fingerprints; tensors may lie elsewhere.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._columns: dict[torch.device, Tensor] = {}
        self._rows: dict[torch.device, Tensor] = {}

    def of(self, tensors: Iterable[Tensor]) -> Tensor:
        """Returns the 0-dim int64 fingerprint of one tensor, or of one that lies in several parts, in their order.

        Args:
            tensors: of one or two dimensions (further ones count as columns) and any dtype of 1, 2, 4 or 8 bytes.
        """
        total = torch.zeros((), dtype=torch.int64, device=self.device)
        for tensor in tensors:
            total = total * 31 + self._of(tensor).to(self.device)
        return total

    def _of(self, tensor: Tensor) -> Tensor:
        bits = tensor.detach().view(_BITS[tensor.element_size()])
        bits = bits.view(1, -1) if bits.dim() < 2 else bits.flatten(1)
        num_rows, num_columns = bits.shape
        columns = _at_least(self._columns, 0, num_columns, bits.device)[:num_columns]
        factors = _at_least(self._rows, _ROWS_BEGIN, num_rows, bits.device)
        total = torch.zeros((), dtype=torch.int64, device=bits.device)
        step = max(1, AT_ONCE // max(1, num_columns))
        for first in range(0, num_rows, step):
            rows = (bits[first : first + step] * columns).sum(1)
            total = total + (rows * factors[first : first + rows.shape[0]]).sum()
        return total


def _at_least(kept: dict[torch.device, Tensor], first: int, count: int, device: torch.device) -> Tensor:
    """Returns `count` odd numbers or more, made once."""
    if device not in kept or kept[device].shape[0] < count:
        kept[device] = _odd_numbers(first, count, device)
    return kept[device]
