"""RMSNorm. The weight's gradient goes to its sink; a frozen weight costs nothing in backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.kernels import reference
from engine.ops.gradients import GradientSink
from engine.ops.kernels import Kernels


def offset_weight(weight: Tensor, offset: float) -> Tensor:
    """Returns weight + offset, in fp32 or wider where there is an offset: next to 1, a small weight would lose its
    bits."""
    if offset == 0.0:
        return weight
    return weight.to(torch.promote_types(weight.dtype, torch.float32)) + offset


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, sink: GradientSink | None, offset: float) -> Tensor:
        y, rstd = reference.rmsnorm_forward(x, offset_weight(weight, offset), eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.sink, ctx.offset = sink, offset
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        x, weight, rstd = ctx.saved_tensors
        if ctx.sink is not None:
            ctx.sink.add(reference.rmsnorm_weight_gradient(dy, x, rstd))
        dx = None
        if ctx.needs_input_grad[0]:
            dx = reference.rmsnorm_backward(dy, x, offset_weight(weight, ctx.offset), rstd)
        return dx, None, None, None, None


class _KernelRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, sink: GradientSink | None, offset: float, kernels: Kernels
    ) -> Tensor:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rstd = kernels.norm_forward(x, offset_weight(weight, offset), eps, y)
        ctx.save_for_backward(x, weight, rstd)
        ctx.sink, ctx.offset, ctx.kernels = sink, offset, kernels
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        x, weight, rstd = ctx.saved_tensors
        gradient = None if ctx.sink is None else ctx.sink.buffer
        weight = offset_weight(weight, ctx.offset)
        dx = ctx.kernels.norm_backward(dy.contiguous(), x, weight, rstd, None, gradient)
        if ctx.sink is not None:
            ctx.sink.added()
        return dx, None, None, None, None, None


def output_rmsnorm(
    x_TF: Tensor, weight_F: Tensor, eps: float, sink: GradientSink | None, offset: float, kernels: Kernels
) -> Tensor:
    """Computes `rmsnorm` of a linear's output [T, F], or of columns of it, by the backend's kernels."""
    rows = x_TF if x_TF.stride(1) == 1 else x_TF.contiguous()
    return _KernelRMSNorm.apply(rows, weight_F, eps, sink, offset, kernels)


def rmsnorm(x: Tensor, weight: Tensor, eps: float, sink: GradientSink | None, offset: float = 0.0) -> Tensor:
    """Computes x / rms(x) * (weight + offset) over the last dimension; statistics in fp32.

    Args:
        x: [..., F].
        weight: [F].
        sink: where the weight's gradient goes; None where it is frozen.
    """
    return _RMSNorm.apply(x, weight, eps, sink, offset)
