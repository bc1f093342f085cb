"""Measures once what a device computes at most: the speed of a square product in the run's dtype."""

from __future__ import annotations

import time

import torch

_SIDES = {"cuda": 4096, "cpu": 512}
_TURNS = 5


def measure_products(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of a few products. A fraction of a second, before the first step.

    Args:
        device: of the run.
        dtype: of the run's arithmetic.
    """
    side = _SIDES.get(device.type, 512)
    generator = torch.Generator(device).manual_seed(0)  # the run's own generators stay as they are
    left, right = (torch.randn(side, side, device=device, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    best = float("inf")
    for _ in range(_TURNS):
        _settle(device)
        begin = time.perf_counter()
        torch.mm(left, right, out=out)
        _settle(device)
        best = min(best, time.perf_counter() - begin)
    return float(2 * side**3 / best)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
