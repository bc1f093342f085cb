"""The causal convolution of each channel within documents, and the gated norm; with gradients in sinks.

Legend: T tokens, C channels, W taps, N heads, V features of a head.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from engine.distributed.mesh import Axis
from engine.hybrids.kernels import HybridKernels
from engine.hybrids.ops.passing import add_continued_gradients, add_tail_gradients, continued_tails, received_tails
from engine.hybrids.pieces import Pieces
from engine.layers.module import ShardEntry
from engine.ops.gradients import GradientSink

Gate = Literal["silu", "sigmoid"]


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sinks: tuple[GradientSink | None, GradientSink | None],
        pieces: Pieces,
        axis: Axis,
        activation: str | None,
        kernels: HybridKernels,
    ) -> Tensor:
        tail = None
        if axis.size > 1 and pieces.links:
            tail = received_tails(x, weight.shape[-1], pieces, axis)
        elif pieces.parents:
            tail = continued_tails(x, weight.shape[-1], pieces)
        tail = tail if pieces.received else None
        ctx.save_for_backward(x, weight, bias, tail)
        ctx.sinks, ctx.pieces, ctx.axis, ctx.activation, ctx.kernels = sinks, pieces, axis, activation, kernels
        return kernels.conv_forward(x, weight.squeeze(1), bias, pieces, tail, activation=activation)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight, bias, tail = ctx.saved_tensors
        buffers = [None if sink is None else sink.buffer for sink in ctx.sinks]
        dx, d_tail = ctx.kernels.conv_backward(
            dy.contiguous(), x, weight.squeeze(1), bias, ctx.pieces, tail, activation=ctx.activation,
            weight_gradient=None if buffers[0] is None else buffers[0].squeeze(1), bias_gradient=buffers[1],
        )  # fmt: skip
        for sink in ctx.sinks:
            if sink is not None:
                sink.added()
        if ctx.axis.size > 1 and ctx.pieces.links:
            if d_tail is None:
                d_tail = dx.new_zeros((0, weight.shape[-1] - 1, dx.shape[1]))
            add_tail_gradients(dx, d_tail, ctx.pieces, ctx.axis)
        elif ctx.pieces.parents:
            add_continued_gradients(dx, d_tail, ctx.pieces)
        return dx, None, None, None, None, None, None, None


def causal_convolution(
    x_TC: Tensor,
    weight: ShardEntry,
    bias: ShardEntry | None,
    pieces: Pieces,
    axis: Axis,
    *,
    activation: str | None,
    kernels: HybridKernels,
) -> Tensor:
    """Computes the convolution within documents; see `engine.hybrids.reference.conv_forward`.

    Args:
        x_TC: may be columns of a wider tensor.
        weight: [C, 1, W].
        bias: [C].
        axis: the context ranks.

    Returns:
        [T, C].
    """
    out: Tensor = _Convolution.apply(
        x_TC, weight.parameter, None if bias is None else bias.parameter,
        (weight.sink, None if bias is None else bias.sink), pieces, axis, activation, kernels,
    )  # fmt: skip
    return out


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        z: Tensor,
        weight: Tensor,
        sink: GradientSink | None,
        eps: float,
        gate: Gate,
        kernels: HybridKernels,
    ) -> Tensor:
        ctx.save_for_backward(x, z, weight)
        ctx.sink, ctx.eps, ctx.gate, ctx.kernels = sink, eps, gate, kernels
        compute = kernels.gated_norm_forward if gate == "silu" else kernels.sigmoid_norm_forward
        return compute(x, z, weight, eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, z, weight = ctx.saved_tensors
        buffer = None if ctx.sink is None else ctx.sink.buffer
        kernels = ctx.kernels
        compute = kernels.gated_norm_backward if ctx.gate == "silu" else kernels.sigmoid_norm_backward
        dx, dz = compute(dy.contiguous(), x, z, weight, ctx.eps, buffer)
        if ctx.sink is not None:
            ctx.sink.added()
        return dx, dz, None, None, None, None, None


def gated_norm(
    x_TNV: Tensor, z_TNV: Tensor, weight: ShardEntry, *, eps: float, gate: Gate = "silu", kernels: HybridKernels
) -> Tensor:
    """Computes x / rms(x) * weight * gate(z) of each head.

    Args:
        z_TNV: may be columns of a wider tensor.
        weight: [V].

    Returns:
        [T, N, V].
    """
    out: Tensor = _GatedNorm.apply(x_TNV, z_TNV, weight.parameter, weight.sink, eps, gate, kernels)
    return out
