"""Measures the machine's ceilings beside the work that is compared with them.

A copy of a large tensor gives the speed of memory, a square product that of arithmetic. Both are run in every turn of a
comparison, so that a slow phase of the machine slows the limit too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rankfold.benchmarking.timing import Sample, Work

COPY, PRODUCT = "copy", "square product"


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """The least bytes and operations of any implementation of an op.

    Args:
        moved: bytes: operands read once, results written once.
        operations: floating-point operations of its products; 0 where they do not count beside the bytes.
    """

    moved: int = 0
    operations: int = 0


class Ceilings:
    """The two measurements: memory bandwidth and arithmetic.

    Args:
        device, dtype: of the work that is compared.
        copy_mib: MiB that the copy reads (and writes as many).
        size: of the square product.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, *, copy_mib: int, size: int) -> None:
        # random numbers: products of zeros draw less power and run faster
        self._source = torch.randn(copy_mib * 2**18, device=device)
        self._target = torch.empty_like(self._source)
        self._left, self._right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        self._result = torch.empty_like(self._left)
        self.moved = 2 * self._source.numel() * self._source.element_size()
        self.operations = 2 * size**3

    def copy(self) -> Tensor:
        return self._target.copy_(self._source)

    def product(self) -> Tensor:
        return torch.mm(self._left, self._right, out=self._result)

    def contestants(self, demand: Demand) -> dict[str, Work]:
        """Returns the contestants that give the limit of such an op."""
        return {name: work for name, work in self._all().items() if _needs(demand)[name]}

    def _all(self) -> dict[str, Work]:
        return {COPY: self.copy, PRODUCT: self.product}

    def limits(self, demand: Demand, samples: dict[str, list[Sample]]) -> list[float]:
        """Returns the minimum seconds of the op, one figure per turn: the larger of its bytes and its
        arithmetic.
        """
        times = []
        if demand.moved:
            times.append([demand.moved / self.moved * sample.seconds for sample in samples[COPY]])
        if demand.operations:
            times.append([demand.operations / self.operations * sample.seconds for sample in samples[PRODUCT]])
        return [max(turn) for turn in zip(*times, strict=True)]

    def describe(self, samples: dict[str, Sequence[float]]) -> tuple[str, ...]:
        """Returns sentences with the median speeds over all turns of a section.

        Args:
            samples: seconds of COPY and PRODUCT, as many as were taken.
        """
        sentences = []
        if samples.get(COPY):
            rate = self.moved / _median(samples[COPY])
            sentences.append(f"Copy of {self.moved / 2**21:,.0f} MiB: {rate / 1e9:,.1f} GB/s, read and written.")
        if samples.get(PRODUCT):
            rate = self.operations / _median(samples[PRODUCT])
            size, dtype = self._left.shape[0], str(self._left.dtype).removeprefix("torch.")
            sentences.append(f"Square product of {size} in {dtype}: {rate / 1e12:,.3f} TFLOP/s.")
        return tuple(sentences)


def _needs(demand: Demand) -> dict[str, bool]:
    return {COPY: demand.moved > 0, PRODUCT: demand.operations > 0}


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


_PASSES = 4
"""Passes over a GiB: about a millisecond, in which a layer's forward and backward are launched."""


class ColdCache:
    """Writes more than the device's caches hold, so that each run reads its operands from memory.

    It also keeps a GPU busy while the work after it is launched, so that the device's time is measured. On a CPU
    nothing is written: a step's ops work from its caches.
    """

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty(2**28, device=device) if device.type == "cuda" else None

    def __call__(self) -> None:
        if self._buffer is not None:
            for _ in range(_PASSES):
                self._buffer.zero_()
