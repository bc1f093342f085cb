"""Tensor-parallel linears with the low-rank path inside and every collective in sight.

    y = x W^T + b + s * (drop(x) A^T) B^T

Column: W [O / tp, I], B rows split with it, A whole on every rank. Row: W [O, I / tp], A columns split with it, B whole
on every rank; the low-rank term is added before the one reduction, the bias after it.

What backward leaves as a partial sum over the tensor-parallel ranks depends on where H = drop(x) A^T is made:

| case                                                                   | dA       | dB       |
|------------------------------------------------------------------------|----------|----------|
| column, H from the full x on every rank, dH kept local (LOCAL)          | sum      | complete |
| column, [dX, dH] all-reduced together (JOINT)                           | complete | complete |
| column with sequence parallelism: H from the token shard, x and H       |          |          |
|   gathered, dX and dH reduce-scattered                                  | sum      | complete |
| row, with or without sequence parallelism                              | complete | sum      |

The layers record this in each factor's ShardSpec; the optimizer sums what is recorded there, once per step.
With sequence parallelism a column linear's input, and a row linear's output, hold this rank's T / tp tokens.

Legend: T tokens, I input features, O output features, R stacked adapter rows; all of this rank unless said otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.distributed.collectives import (
    all_gather_async,
    all_reduce,
    all_reduce_async,
    reduce_scatter,
    reduce_scatter_async,
)
from engine.distributed.mesh import Axis
from engine.ops.context import TokenContext
from engine.ops.gradients import GradientSink
from engine.ops.low_rank import (
    LowRank,
    accumulate_a,
    accumulate_b,
    add_expansion,
    add_input_gradient,
    dropped_input,
    project,
    projection_gradient,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsSink:
    """Gradient destination of the output rows [first, first + count) of a linear's weight and bias."""

    first: int
    count: int
    weight: GradientSink | None
    bias: GradientSink | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearOperands:
    """What a parallel linear computes with on this rank.

    Args:
        weight_OI: [O, I].
        bias_O: [O] or None.
        low_rank: the adapters, or None.
        sinks: gradient destinations of the trainable output rows; empty for a frozen base.
        axis: tensor-parallel axis.
        sequence_parallel: see the module's text.
        joint: column without sequence parallelism: the JOINT row of the table.
    """

    weight_OI: Tensor
    bias_O: Tensor | None
    low_rank: LowRank | None
    sinks: tuple[RowsSink, ...]
    axis: Axis
    sequence_parallel: bool
    joint: bool = False

    @property
    def trains_weight(self) -> bool:
        return any(sink.weight is not None for sink in self.sinks)


def _mask(operands: LinearOperands, context: TokenContext, token_index: Tensor, num_features: int) -> Tensor | None:
    low_rank = operands.low_rank
    if low_rank is None or low_rank.dropout is None or not context.training:
        return None
    return low_rank.dropout.mask(token_index, num_features, context.step)


def _accumulate_base(operands: LinearOperands, dy_TO: Tensor, x_TI: Tensor | None, bias_dy_TO: Tensor) -> None:
    """dW = dY^T x and db = sum of dY, into the sinks of the trainable rows."""
    for sink in operands.sinks:
        if sink.weight is not None:
            assert x_TI is not None
            sink.weight.add_product(dy_TO.narrow(1, sink.first, sink.count).t(), x_TI)
        if sink.bias is not None:
            sink.bias.add(bias_dy_TO.narrow(1, sink.first, sink.count).sum(0, dtype=torch.float32))


class _ColumnLinear(torch.autograd.Function):
    """The leaves (trainable tensors) are passed only so that autograd knows the output depends on them."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, operands: LinearOperands, context: TokenContext, *leaves: Tensor) -> Tensor:
        low_rank, axis = operands.low_rank, operands.axis
        gathers = operands.sequence_parallel and axis.size > 1
        index = context.local_token_index if gathers else context.token_index
        mask = _mask(operands, context, index, x_TI.shape[1])
        h_TR = None
        if gathers:
            full, x_handle = all_gather_async(x_TI, axis)
            h_handle = None
            if low_rank is not None:  # hides the gather of x; the gather of H is hidden by the base product
                h_TR, h_handle = all_gather_async(project(x_TI, mask, low_rank), axis)
            x_handle.wait()
            y_TO = full @ operands.weight_OI.t()
            if h_handle is not None:
                h_handle.wait()
        else:
            y_TO = x_TI @ operands.weight_OI.t()
            if low_rank is not None:
                h_TR = project(x_TI, mask, low_rank)
        if low_rank is not None and h_TR is not None:
            add_expansion(y_TO, h_TR, low_rank)
        if operands.bias_O is not None:
            y_TO.add_(operands.bias_O)
        keeps_input = low_rank is not None or operands.trains_weight
        ctx.save_for_backward(x_TI if keeps_input else None, h_TR, mask)
        ctx.operands, ctx.gathers, ctx.num_leaves = operands, gathers, len(leaves)
        return y_TO

    @staticmethod
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Any, ...]:
        x_TI, h_TR, mask = ctx.saved_tensors
        operands: LinearOperands = ctx.operands
        run = _column_backward_sequence if ctx.gathers else _column_backward
        dx_TI = run(operands, dy_TO, x_TI, h_TR, mask, ctx.needs_input_grad[0])
        return (dx_TI, None, None, *([None] * ctx.num_leaves))


def _column_backward(
    operands: LinearOperands, dy: Tensor, x: Tensor | None, h: Tensor | None, mask: Tensor | None, needs_dx: bool
) -> Tensor | None:
    """Full tokens on every rank: dX is all-reduced while dA and dB are computed."""
    low_rank, axis = operands.low_rank, operands.axis
    dh = projection_gradient(dy, low_rank) if low_rank is not None else None
    if operands.joint and axis.size > 1 and needs_dx and low_rank is not None and dh is not None:
        return _column_backward_joint(operands, dy, x, h, mask, dh)
    dx, handle = None, None
    if needs_dx:
        dx = dy @ operands.weight_OI
        if low_rank is not None and dh is not None:
            dx = add_input_gradient(dx, dh, mask, low_rank)
        dx, handle = all_reduce_async(dx, axis)
    if low_rank is not None and dh is not None and x is not None and h is not None:
        if operands.joint:
            # without dX there is nothing to send dH along with; it must be complete all the same
            dh = all_reduce(dh, axis)
        accumulate_b(dy, h, low_rank)
        accumulate_a(dh, dropped_input(x, mask, low_rank), low_rank)
    _accumulate_base(operands, dy, x, dy)
    if handle is not None:
        handle.wait()
    return dx


def _column_backward_joint(
    operands: LinearOperands, dy: Tensor, x: Tensor | None, h: Tensor | None, mask: Tensor | None, dh: Tensor
) -> Tensor:
    """[dX_base, dH] cross the ranks in one buffer; dX += drop'(dH A) follows on the complete dH."""
    low_rank = operands.low_rank
    assert low_rank is not None and x is not None and h is not None
    num_features = operands.weight_OI.shape[1]
    both = dy.new_empty(dy.shape[0], num_features + dh.shape[1])
    torch.mm(dy, operands.weight_OI, out=both[:, :num_features])
    both[:, num_features:] = dh
    both, handle = all_reduce_async(both, operands.axis)
    accumulate_b(dy, h, low_rank)
    _accumulate_base(operands, dy, x, dy)
    handle.wait()
    dx, dh = both[:, :num_features].contiguous(), both[:, num_features:]
    accumulate_a(dh, dropped_input(x, mask, low_rank), low_rank)
    return add_input_gradient(dx, dh, mask, low_rank)


def _column_backward_sequence(
    operands: LinearOperands, dy: Tensor, x: Tensor | None, h: Tensor | None, mask: Tensor | None, needs_dx: bool
) -> Tensor | None:
    """Token shards: dH and dX are reduce-scattered; dB hides the first, dA the second."""
    low_rank, axis = operands.low_rank, operands.axis
    full, x_handle = (None, None)
    if operands.trains_weight and x is not None:
        full, x_handle = all_gather_async(x, axis)  # hidden by dX's product
    dh, dh_handle = None, None
    if low_rank is not None:
        dh, dh_handle = reduce_scatter_async(projection_gradient(dy, low_rank), axis)
    dx, dx_handle = None, None
    if needs_dx:
        dx, dx_handle = reduce_scatter_async(dy @ operands.weight_OI, axis)
    if low_rank is not None and h is not None:
        accumulate_b(dy, h, low_rank)
    if x_handle is not None:
        x_handle.wait()
    _accumulate_base(operands, dy, full, dy)
    if low_rank is not None and dh is not None and dh_handle is not None and x is not None:
        dh_handle.wait()
        accumulate_a(dh, dropped_input(x, mask, low_rank), low_rank)
    if dx is not None and dx_handle is not None:
        dx_handle.wait()
        if low_rank is not None and dh is not None:
            dx = add_input_gradient(dx, dh, mask, low_rank)
    return dx


class _RowLinear(torch.autograd.Function):
    """The leaves (trainable tensors) are passed only so that autograd knows the output depends on them."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, operands: LinearOperands, context: TokenContext, *leaves: Tensor) -> Tensor:
        low_rank, axis = operands.low_rank, operands.axis
        scatters = operands.sequence_parallel and axis.size > 1
        mask = _mask(operands, context, context.token_index, x_TI.shape[1])
        y_TO = x_TI @ operands.weight_OI.t()
        h_TR = None
        if low_rank is not None:
            h_TR = project(x_TI, mask, low_rank)
            add_expansion(y_TO, h_TR, low_rank)
        y_TO = reduce_scatter(y_TO, axis) if scatters else all_reduce(y_TO, axis)
        if operands.bias_O is not None:
            y_TO.add_(operands.bias_O)
        keeps_input = low_rank is not None or operands.trains_weight
        ctx.save_for_backward(x_TI if keeps_input else None, h_TR, mask)
        ctx.operands, ctx.scatters, ctx.num_leaves = operands, scatters, len(leaves)
        return y_TO

    @staticmethod
    def backward(ctx: Any, local_dy_TO: Tensor) -> tuple[Any, ...]:
        x_TI, h_TR, mask = ctx.saved_tensors
        operands: LinearOperands = ctx.operands
        low_rank = operands.low_rank
        dy_TO = local_dy_TO
        if ctx.scatters:
            dy_TO, handle = all_gather_async(local_dy_TO, operands.axis)
            handle.wait()
        dh_TR = projection_gradient(dy_TO, low_rank) if low_rank is not None else None
        dx_TI = None
        if ctx.needs_input_grad[0]:
            dx_TI = dy_TO @ operands.weight_OI
            if low_rank is not None and dh_TR is not None:
                dx_TI = add_input_gradient(dx_TI, dh_TR, mask, low_rank)
        if low_rank is not None and dh_TR is not None:
            accumulate_a(dh_TR, dropped_input(x_TI, mask, low_rank), low_rank)
            accumulate_b(dy_TO, h_TR, low_rank)
        # the bias is added to this rank's tokens only, after the reduction
        _accumulate_base(operands, dy_TO, x_TI, local_dy_TO)
        return (dx_TI, None, None, *([None] * ctx.num_leaves))


def column_linear(x_TI: Tensor, operands: LinearOperands, context: TokenContext, leaves: tuple[Tensor, ...]) -> Tensor:
    """Column-parallel linear.

    Args:
        x_TI: [T, I], or [T / tp, I] with sequence parallelism.
        operands: weights, adapters and axis of this rank.
        context: token coordinates.
        leaves: every tensor in `operands` that requires a gradient.

    Returns:
        [T, O / tp].
    """
    return _ColumnLinear.apply(x_TI, operands, context, *leaves)


def row_linear(x_TI: Tensor, operands: LinearOperands, context: TokenContext, leaves: tuple[Tensor, ...]) -> Tensor:
    """Row-parallel linear: [T, I / tp] -> [T, O], or [T / tp, O] with sequence parallelism. See `column_linear`."""
    return _RowLinear.apply(x_TI, operands, context, *leaves)
