"""The largest number of each set of linears that share a scale of scales.

NVFP4 has one fp32 scale a matrix. Servers put query, key and value, and gate and up, into one matrix each, and keep one
such scale of it: so the linears get the same one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from engine.checkpoint.copying.direct_io import Scratch
from engine.conversion.low_precision.matrices import Matrix
from engine.errors import UserError


class SharedScales:
    """The largest numbers, each found when one of its linears is first written.

    Args:
        matrix: gives the rows of a weight by its logical name.
        sharing: name of a weight -> those of all that have one scale with it.
    """

    def __init__(self, matrix: Callable[[str], Matrix], sharing: Mapping[str, Sequence[str]]) -> None:
        self._matrix, self._sharing = matrix, sharing
        self._found: dict[tuple[str, ...], Tensor] = {}
        self._locks: dict[tuple[str, ...], threading.Lock] = {}
        self._lock = threading.Lock()

    def largest(self, matrix: Matrix, scratch: Scratch) -> Tensor:
        """Returns the largest magnitude that a matrix's scale is made from, fp32 [].

        Raises:
            UserError: a number is not finite.
        """
        members = {name for member in matrix.members for name in self._sharing[member.name]}
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
