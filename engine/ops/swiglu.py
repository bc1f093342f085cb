"""SwiGLU on [gate | up] side by side. Saves its input only; the activation is made again in backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from triton_kernels import reference


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return reference.swiglu_forward(gate_up)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        return reference.swiglu_backward(dy, gate_up)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [T, 2F] -> [T, F]."""
    return _SwiGLU.apply(gate_up)
