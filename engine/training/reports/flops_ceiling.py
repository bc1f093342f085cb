"""Measures a device's peak arithmetic once: the speed of a square product in the run's dtype."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import torch

_SIDES = {"cuda": 8192, "cpu": 512}
"""On a GPU large enough that the last wave of tiles, which fills the machine only in part, hardly counts."""
_TURNS = 5
_AT_ONCE = 4
"""Products between two events of a GPU."""


def measure_products(device: torch.device, dtype: torch.dtype) -> float:
    """Returns the FLOP/s of the fastest of a few products. Takes a fraction of a second, before the first step.

    Args:
        device: of the run.
        dtype: of the run's arithmetic.
    """
    side = _SIDES.get(device.type, 512)
    generator = torch.Generator(device).manual_seed(0)  # the run's own generators stay as they are
    left, right = (torch.randn(side, side, dtype=dtype, device=device, generator=generator) for _ in range(2))
    out = torch.empty_like(left)

    def product() -> None:
        torch.mm(left, right, out=out)

    product()  # the first one loads the library and chooses a kernel
    seconds = _by_events(product) if device.type == "cuda" else _by_clock(product)
    return float(2 * side**3 / seconds)


def _by_clock(product: Callable[[], None]) -> float:
    """Returns the seconds of the fastest of a few runs."""
    best = float("inf")
    for _ in range(_TURNS):
        begin = time.perf_counter()
        product()
        best = min(best, time.perf_counter() - begin)
    return best


def _by_events(product: Callable[[], None]) -> float:
    """Returns the seconds of a run in the fastest of a few groups, between events on the stream.

    Everything is launched before anything is waited for, so that no launch and no wait of the host is in the figure.
    """
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_TURNS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        for _ in range(_AT_ONCE):
            product()
        mark.record()
    marks[-1].synchronize()
    milliseconds = [float(begin.elapsed_time(end)) for begin, end in pairwise(marks)]
    return min(milliseconds) / 1e3 / _AT_ONCE
