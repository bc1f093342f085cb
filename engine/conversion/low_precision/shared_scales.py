"""The largest number of each set of linears that share a scale of scales.

NVFP4 has one fp32 scale a matrix. Servers put query, key and value, and gate and up, into one matrix each, and keep one
such scale of it: so the linears get the same one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from engine.checkpoint.copying.direct_io import Scratch
from engine.conversion.low_precision.matrices import Matrix
from engine.errors import UserError
from engine.models.names import FUSED, fused_parts

_FUSED_LEAF = {part.rpartition(".")[2]: fused.rpartition(".")[2] for fused, parts in FUSED.items() for part in parts}
"""Linear -> the one that servers make of it and others on the same input."""


def fused_by_servers(name: str, packed: Collection[str]) -> tuple[str, ...]:
    """Returns the weights among `packed` that servers put into one matrix with `name`, itself among them."""
    module = name.rpartition(".")[0]
    parent, _, leaf = module.rpartition(".")
    parts = fused_parts(f"{parent}.{_FUSED_LEAF[leaf]}") if leaf in _FUSED_LEAF else [module]
    found = tuple(weight for part in parts if (weight := f"{part}.weight") in packed)
    return found if name in found else (name,)


class SharedScales:
    """The largest numbers, each found when one of its linears is first written.

    Args:
        matrix: gives the rows of a weight by its logical name.
        packed: the weights that are rounded.
    """

    def __init__(self, matrix: Callable[[str], Matrix], packed: Collection[str]) -> None:
        self._matrix, self._packed = matrix, packed
        self._found: dict[tuple[str, ...], Tensor] = {}
        self._locks: dict[tuple[str, ...], threading.Lock] = {}
        self._lock = threading.Lock()

    def largest(self, matrix: Matrix, scratch: Scratch) -> Tensor:
        """Returns the largest magnitude that a matrix's scale is made from, fp32 [].

        Raises:
            UserError: a number is not finite.
        """
        members = {name for member in matrix.members for name in fused_by_servers(member.name, self._packed)}
        key = tuple(sorted(members))
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._found:
                self._found[key] = self._search(key, scratch)
            return self._found[key]

    def _search(self, names: Sequence[str], scratch: Scratch) -> Tensor:
        largest = torch.zeros(())
        for name in names:
            for _, rows in self._matrix(name).blocks(scratch):
                largest = torch.maximum(largest, rows.abs().amax())
            if not bool(largest.isfinite()):
                raise UserError(f"{name} has a number that is not finite: use another copy of the model.")
        return largest
