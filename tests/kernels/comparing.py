"""How kernels are compared: where they run, what an input looks like, and how large an error may be.

They run on the GPU where there is one, and through Triton's interpreter on a CPU otherwise. Triton decides at its
import whether it interprets, so a process in which it was imported before (transformers does that) cannot run them any
more: there they are skipped, and `test_interpreted.py` runs them in a process of their own.
"""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest
import torch
from torch import Tensor

_ON_CPU = importlib.util.find_spec("triton") is not None and not torch.cuda.is_available()
TOO_LATE = _ON_CPU and "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1"
"""Triton is here, not interpreting; true only where it was imported before the first kernel test."""
INTERPRETED = _ON_CPU and not TOO_LATE

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


interpreted_only = pytest.mark.skipif(
    not INTERPRETED,
    reason="run by test_interpreted.py" if TOO_LATE else "kernels are compiled, not interpreted, with a GPU",
)


def _places(*slow: torch.dtype) -> pytest.MarkDecorator:
    """Parametrizes a test with the interpreter and the GPU and every dtype.

    Args:
        slow: dtypes that are interpreted only where slow tests are asked for.
    """
    marks = {"cpu": [interpreted_only], "cuda": [pytest.mark.gpu]}
    return pytest.mark.parametrize(
        "place",
        [
            pytest.param(
                (device, dtype),
                marks=[*mark, pytest.mark.slow] if device == "cpu" and dtype in slow else mark,
                id=f"{device}-{str(dtype)[6:]}",
            )
            for device, mark in marks.items()
            for dtype in _DTYPES
        ],
    )


places = _places(torch.float16)
"""Parametrizes a test with (device, dtype); 16 bits are interpreted as `tests.kernels.sixteen_bits` says, float16 where
slow tests are asked for: bfloat16 needs the same casts, and is what trains."""
long_places = _places(torch.float16, torch.bfloat16)
"""The same for tests of many kernels, each of which has a test of its own."""


def random_rows(place: tuple[str, torch.dtype], *shape: int, gap: int = 0, seed: int = 0) -> Tensor:
    """Normal numbers, the same on every device; rows lie `gap` elements further apart than they are long."""
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    wide = torch.randn(*shape[:-1], shape[-1] + gap, generator=generator).to(place[1]).to(place[0])
    return wide[..., : shape[-1]]


def assert_as_exact_as_torch(ours: Tensor, torchs: Tensor, exact: Tensor, name: str) -> None:
    """The largest error against fp64 is at most twice that of torch at the same dtype, and one rounding.

    The rounding, of the largest value, is there because torch may hit a small tensor exactly. Results in fp64 have no
    wider truth, only torch's own fp64: sixteen roundings are allowed there. On a GPU eight are in fp32, where torch
    adds up in parts and a kernel here token by token: up to seven were seen on an H200, for sums of 1,100 numbers.

    Args:
        ours, torchs: results in the tested dtype.
        exact: fp64, from the same inputs.
    """
    assert ours.shape == exact.shape, (name, ours.shape, exact.shape)
    assert exact.dtype == torch.float64
    if exact.numel() == 0:
        return
    error = (ours.double() - exact).abs().max().item()
    allowed = (torchs.double() - exact).abs().max().item()
    roundings = 16 if ours.dtype == torch.float64 else 8 if ours.is_cuda and ours.dtype == torch.float32 else 1
    rounding = roundings * torch.finfo(ours.dtype).eps * exact.abs().max().item()
    assert error <= 2 * allowed + rounding, f"{name}: error {error:.3e}, torch {allowed:.3e}, rounding {rounding:.3e}"


def assert_rounded_once(ours: Tensor, exact: Tensor, name: str) -> None:
    """Each number is a sum in fp32, rounded to the result's dtype at the end and nowhere on the way.

    That sum may be off by 2^-14 of the largest number: hundreds of roundings of fp32, and an eighth of one of float16
    or a sixty-fourth of one of bfloat16 at that size. Rounding keeps order, so the result lies between the two ends
    of that range, rounded.

    Args:
        ours: the result, of operands that are exact in their 16 bits or in fp32.
        exact: fp64, from the same operands.
    """
    if exact.numel() == 0:
        return
    assert exact.dtype == torch.float64 and ours.shape == exact.shape
    off = 2.0**-14 * exact.abs().max()
    outside = (ours < (exact - off).to(ours.dtype)) | (ours > (exact + off).to(ours.dtype))
    assert not outside.any(), f"{name}: {int(outside.sum())} of {ours.numel()} numbers are not an fp32 sum rounded once"
