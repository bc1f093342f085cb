"""A backend's training against the reference's: the same losses and gradients but for rounding, and no more of that."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from engine.models.decoder_config import DecoderConfig
from engine.models.ropes import Rope
from engine.ops.kernels import REFERENCE, Kernels
from tests.support.small_training import SmallTraining

CONFIG = DecoderConfig(
    family="llama", hidden=24, intermediate=36, num_layers=2, num_heads=3, num_kv_heads=1, head_dim=6, vocab_size=41,
    norm_eps=1e-5, ropes=(Rope(theta=1e4),),
)  # fmt: skip
WRONG_GRADIENT = "its gradient is off"
"""In the sentence of a check that failed because of a gradient."""
_IN_FP32 = 1e-5
"""Relative: some tens of roundings, one after the other."""
_ROUNDS_MORE = 3.0
"""Where both round to 16 bits. Either's error is a sum of roundings of like size and random sign, so it grows with the
square root of their number: three times the reference's takes nine times as many."""


def tiny_training(dropout: float, **options: Any) -> SmallTraining:
    """A training that even interpreted kernels get through."""
    return SmallTraining(**{"config": CONFIG, "documents": ((9, 4), (13,)), "dropout": dropout, **options})


def assert_follows_the_reference(
    training: SmallTraining, kernels: Kernels, device: torch.device, dtype: torch.dtype, *, steps: int = 4
) -> None:
    """Fails, naming a parameter, where a gradient is further from that of exact arithmetic than rounding explains.

    In 16 bits exact arithmetic is the reference in fp64, from the same rounded weights, and what rounding explains is
    measured: the distance of the reference in that dtype.

    Args:
        training: what is trained.
        kernels: the backend in question.
        device, dtype: of the model.
        steps: how many losses are compared too.
    """
    losses, gradients = training.run(kernels, steps=steps, device=device, dtype=dtype)
    torch_losses, torchs = _by_the_reference(training, device, dtype, None, steps)
    if dtype == torch.float32:
        exact_losses, exact = torch_losses, torchs
    else:
        exact_losses, exact = _by_the_reference(training, device, torch.float64, dtype, steps)
    assert gradients.keys() == exact.keys() and gradients
    for name, truth in exact.items():
        error, torch_error = ((one[name] - truth).norm() / truth.norm() for one in (gradients, torchs))
        allowed = _IN_FP32 if dtype == torch.float32 else _ROUNDS_MORE * torch_error
        assert allowed < 0.2, f"{name}: the reference is off by {torch_error:.1e}, too far to judge by"
        assert error <= allowed, f"{name}: {WRONG_GRADIENT} by {error:.1e}, the reference's by {torch_error:.1e}"
    if steps > 0:
        _assert_losses_follow(losses, torch_losses, exact_losses, dtype)


def _assert_losses_follow(ours: Tensor, torchs: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """In 16 bits no further from exact losses than twice the reference's, and one rounding where that is right by
    luck."""
    if dtype == torch.float32:
        assert ((ours - torchs).abs() <= _IN_FP32 * torchs).all(), (ours, torchs)
        return
    error, allowed = (ours - exact).abs().max(), (torchs - exact).abs().max()
    assert error <= 2 * allowed + torch.finfo(dtype).eps * exact.abs().max(), (ours, torchs, exact)


@cache
def _by_the_reference(
    training: SmallTraining, device: torch.device, dtype: torch.dtype, start: torch.dtype | None, steps: int
) -> tuple[Tensor, dict[str, Tensor]]:
    return training.run(REFERENCE, steps=steps, device=device, dtype=dtype, start=start)
