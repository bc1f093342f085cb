"""How kernels are compared: where they run, what an input looks like, and how large an error may be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

_GPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _places() -> list[object]:
    """("cpu", fp32) through the interpreter, and the GPU with every dtype."""
    absent = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled, not interpreted, with a GPU")
    on_cpu = pytest.param(("cpu", torch.float32), marks=absent, id="cpu-float32")
    on_gpu = [pytest.param(("cuda", t), marks=pytest.mark.gpu, id=f"cuda-{str(t)[6:]}") for t in _GPU_DTYPES]
    return [on_cpu, *on_gpu]


places = pytest.mark.parametrize("place", _places())
"""Parametrizes a test with (device, dtype)."""


def random_rows(place: tuple[str, torch.dtype], *shape: int, gap: int = 0, seed: int = 0) -> Tensor:
    """Normal numbers, the same on every device; rows lie `gap` elements further apart than they are long."""
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    wide = torch.randn(*shape[:-1], shape[-1] + gap, generator=generator).to(place[1]).to(place[0])
    return wide[..., : shape[-1]]


def assert_as_exact_as_torch(ours: Tensor, torchs: Tensor, exact: Tensor, name: str) -> None:
    """The largest error against fp64 is at most twice that of torch at the same dtype, and one rounding.

    The rounding, of the largest value, is there because torch may hit a small tensor exactly. Results in fp64 have no
    wider truth, only torch's own fp64: sixteen roundings are allowed there.

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
    roundings = 16 if ours.dtype == torch.float64 else 1
    rounding = roundings * torch.finfo(ours.dtype).eps * exact.abs().max().item()
    assert error <= 2 * allowed + rounding, f"{name}: error {error:.3e}, torch {allowed:.3e}, rounding {rounding:.3e}"
