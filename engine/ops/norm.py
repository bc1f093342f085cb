"""RMSNorm. The weight's gradient goes to its sink; a frozen weight costs nothing in backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.ops.gradients import GradientSink
from triton_kernels import reference


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, sink: GradientSink | None) -> Tensor:
        y, rstd = reference.rmsnorm_forward(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.sink = sink
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, weight, rstd = ctx.saved_tensors
        if ctx.sink is not None:
            ctx.sink.add(reference.rmsnorm_weight_gradient(dy, x, rstd))
        dx = reference.rmsnorm_backward(dy, x, weight, rstd) if ctx.needs_input_grad[0] else None
        return dx, None, None, None


def rmsnorm(x: Tensor, weight: Tensor, eps: float, sink: GradientSink | None) -> Tensor:
    """x / rms(x) * weight over the last dimension; statistics in fp32.

    Args:
        x: [..., F].
        weight: [F].
        sink: where the weight's gradient goes; None where it is frozen.
    """
    return _RMSNorm.apply(x, weight, eps, sink)
