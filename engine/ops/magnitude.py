"""DoRA (arXiv 2402.09353): an adapted linear's output rows have a trained length beside their direction.

    y = g z + b,   g = m / |W + s B A|,   z = x W^T + H B^T

The length |W + s B A| of each output row is taken as a constant in backward, as the paper's section 4.3 proposes and as
PEFT does, so that dz = g dy and dm = sum over tokens of dy z / |W + s B A|. It comes from

    |W + s B A|^2 = |W|^2 + 2 s (W A^T) . B + s^2 (B A A^T) . B        (per row)

which never makes the sum of the matrices. Every term is a sum over input features: where these are split over the
tensor-parallel ranks, the ranks' parts are added up. z is complete when it gets here, and g is the same on all ranks
that share a row.

Legend: T tokens, I input features, O output features, R rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.distributed.collectives import all_reduce
from engine.ops.adapters import Adapter
from engine.ops.attention.token_context import TokenContext
from engine.ops.gradients import GradientSink
from engine.ops.operands import LinearOperands


@dataclass(frozen=True, kw_only=True, slots=True)
class Magnitude:
    """The trained lengths of one adapter's output rows.

    Args:
        m_O: [o], of this rank's rows.
        adapter: the one it belongs to.
        sink: of the gradient of m.
    """

    m_O: Tensor
    adapter: Adapter
    sink: GradientSink | None


def row_lengths(operands: LinearOperands, adapter: Adapter, *, split_inputs: bool) -> Tensor:
    """Returns fp32 [o] lengths of the rows of W + s B A that `adapter` adapts.

    Args:
        split_inputs: the input features are split over `operands.axis`.
    """
    assert operands.low_rank is not None
    weight_OI = operands.weight_OI.narrow(0, adapter.first_column, adapter.num_columns)
    a_RI = operands.low_rank.a_RI.narrow(0, adapter.first_row, adapter.num_ranks)
    squares = row_squares(weight_OI, a_RI, adapter.b_OR, adapter.scale)
    if split_inputs:
        squares = all_reduce(squares, operands.axis)
    return squares.clamp_(min=0).sqrt_()


def row_squares(weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float) -> Tensor:
    """Returns fp32 [o] squares of the lengths of the rows of W + s B A over these input features; rounding may leave
    some a little below 0."""
    b = b_OR.float()
    squares = torch.linalg.vector_norm(weight_OI, dim=1, dtype=torch.float32).square()
    squares.add_(((weight_OI @ a_RI.t()).float() * b).sum(1), alpha=2 * scale)
    return squares.add_(((b @ (a_RI.float() @ a_RI.float().t())) * b).sum(1), alpha=scale**2)


class _Scaled(torch.autograd.Function):
    """Scaling; the leaves (trainable magnitudes) are passed only so that autograd knows the output depends on them."""

    @staticmethod
    def forward(
        ctx: Any,
        z_TO: Tensor,
        operands: LinearOperands,
        magnitudes: tuple[Magnitude, ...],
        split_inputs: bool,
        *leaves: Tensor,
    ) -> Tensor:
        lengths = [row_lengths(operands, one.adapter, split_inputs=split_inputs) for one in magnitudes]
        y_TO = z_TO.clone()
        factors = []
        for one, length in zip(magnitudes, lengths, strict=True):
            # rows of nothing but zeros, as padding has them, stay so
            factors.append(one.m_O.float() / length.clamp(min=torch.finfo(torch.float32).tiny))
            one.adapter.columns(y_TO).mul_(factors[-1])
        ctx.save_for_backward(z_TO, *lengths, *factors)
        ctx.magnitudes, ctx.num_leaves = magnitudes, len(leaves)
        return y_TO

    @staticmethod
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Any, ...]:
        z_TO, *rest = ctx.saved_tensors
        count = len(ctx.magnitudes)
        dz_TO = dy_TO.clone()
        for one, length, factor in zip(ctx.magnitudes, rest[:count], rest[count:], strict=True):
            dy = one.adapter.columns(dy_TO)
            if one.sink is not None:
                dm = (dy.float() * one.adapter.columns(z_TO).float()).sum(0)
                one.sink.add(dm / length.clamp(min=torch.finfo(torch.float32).tiny))
            one.adapter.columns(dz_TO).mul_(factor)
        return (dz_TO, None, None, None, *([None] * ctx.num_leaves))


def scaled_output(
    z_TO: Tensor,
    operands: LinearOperands,
    magnitudes: tuple[Magnitude, ...],
    context: TokenContext,
    leaves: tuple[Tensor, ...],
    *,
    split_inputs: bool,
) -> Tensor:
    """Scales a linear's output by its magnitudes; returns z itself where `context` leaves the adapters out.

    Args:
        z_TO: [T, O], the linear's output without its bias.
        operands: the linear's.
        magnitudes: one for each adapter of it.
        leaves: the magnitudes that require a gradient.
        split_inputs: the linear's input features are split over its axis.
    """
    if not context.adapters:
        return z_TO
    return _Scaled.apply(z_TO, operands, magnitudes, split_inputs, *leaves)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterBias:
    """The trained bias of one adapter's B: y += s b.

    Args:
        b_O: [o], of this rank's rows.
        adapter: the one it belongs to.
        sink: of the gradient of b.
    """

    b_O: Tensor
    adapter: Adapter
    sink: GradientSink | None


class _Biased(torch.autograd.Function):
    """Bias; the leaves (trainable biases) are passed only so that autograd knows the output depends on them."""

    @staticmethod
    def forward(ctx: Any, y_TO: Tensor, biases: tuple[AdapterBias, ...], divisor: float, *leaves: Tensor) -> Tensor:
        out_TO = y_TO.clone()
        for one in biases:
            one.adapter.columns(out_TO).add_(one.b_O, alpha=one.adapter.scale / divisor)
        ctx.biases, ctx.divisor, ctx.num_leaves = biases, divisor, len(leaves)
        return out_TO

    @staticmethod
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Any, ...]:
        for one in ctx.biases:
            if one.sink is not None:
                scale = one.adapter.scale / ctx.divisor
                one.sink.add(one.adapter.columns(dy_TO).sum(0, dtype=torch.float32).mul_(scale))
        return (dy_TO, None, None, *([None] * ctx.num_leaves))


def biased_output(
    y_TO: Tensor,
    biases: tuple[AdapterBias, ...],
    context: TokenContext,
    leaves: tuple[Tensor, ...],
    divisor: float = 1.0,
) -> Tensor:
    """Returns a linear's output [T, O] with its adapters' biases; y itself where `context` leaves the adapters out.

    Args:
        leaves: the biases that require a gradient.
        divisor: biases are divided by it, as the output is already.
    """
    return _Biased.apply(y_TO, biases, divisor, *leaves) if context.adapters else y_TO
