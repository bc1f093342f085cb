"""Tensor-parallel linears with the low-rank path inside and every collective in sight.

    y = x W^T + b + H B^T,   H = s * drop(x) A^T,   x made from u (a norm, SwiGLU, or u itself)

Column: W [O / tp, I], B rows split with it, A whole on every rank. Row: W [O, I / tp], A columns split with it, B whole
on every rank; the low-rank term is added before the one reduction, the bias after it. Where adapters are folded, base
and adapter are one product each way: y = [x | H] [W | B]^T and [dX_base | dH] = dY [W | B].

What backward leaves as a partial sum over the tensor-parallel ranks depends on where H is made:

| case                                                                   | dA       | dB       |
|------------------------------------------------------------------------|----------|----------|
| column, H from the full x on every rank, dH kept local (LOCAL)          | sum      | complete |
| column, [dX, dH] all-reduced together (JOINT; always where folded)      | complete | complete |
| column with sequence parallelism: H from the token shard, x and H       |          |          |
|   gathered, dX and dH reduce-scattered                                  | sum      | complete |
| row, with or without sequence parallelism                              | complete | sum      |

The layers record this in each factor's ShardSpec; the optimizer sums what is recorded there, once per step.
With sequence parallelism a column linear's input, and a row linear's output, hold this rank's T / tp tokens.
x is not kept for backward unless it is u: it is made again there (see ops.inputs).

Legend: T tokens, I input features, O output features, R stacked adapter rows; all of this rank unless said otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.distributed.collectives import (
    Handle,
    all_gather_async,
    all_reduce,
    all_reduce_async,
    reduce_scatter,
    reduce_scatter_async,
)
from engine.kernels.records import InputUpdate
from engine.ops.adapters import accumulate_a, accumulate_b, output_gradients, projection_gradient
from engine.ops.context import TokenContext
from engine.ops.inputs import LinearInput
from engine.ops.operands import LinearOperands, accumulate_base
from engine.ops.quantized_products import RowCodes


class _ColumnLinear(torch.autograd.Function):
    """The leaves (trainable tensors) are passed only so that autograd knows the output depends on them."""

    @staticmethod
    def forward(
        ctx: Any, u: Tensor, source: LinearInput, operands: LinearOperands, context: TokenContext, *leaves: Tensor
    ) -> Tensor:
        operands = operands.in_context(context)
        axis = operands.axis
        gathers = operands.sequence_parallel and axis.size > 1
        mask = operands.mask(context, context.local_token_index if gathers else context.token_index)
        x, h, statistics = operands.input_and_projection(u, source, mask, alone=gathers)
        if gathers:
            x, h = _gather_input(operands, x, h)
        y, h = operands.expanded_product(x, h, mask)
        if operands.bias_O is not None:
            y.add_(operands.bias_O)
        ctx.save_for_backward(u, statistics, h, mask)
        ctx.source, ctx.operands, ctx.gathers, ctx.num_leaves = source, operands, gathers, len(leaves)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        u, statistics, h, mask = ctx.saved_tensors
        source, operands = ctx.source, ctx.operands
        needs_du = ctx.needs_input_grad[0] or bool(source.leaves())
        started = _column_input_gradient(operands, dy, h, mask, needs_du, ctx.gathers)
        if h is not None and operands.low_rank is not None and not started.has_b:
            accumulate_b(dy, h, operands.low_rank, operands.kernels)  # hides the collective
        x = _input_again(operands, source, u)
        full, full_handle = x, Handle()
        if operands.trains_weight and x is not None and ctx.gathers:
            full, full_handle = all_gather_async(x, operands.axis)
        travels = _update_after_collective(operands, ctx.gathers)
        if operands.low_rank is not None and not travels:
            _accumulate_a(operands, source, x, u, statistics, started.dh, mask)  # hides the collective
        started.handle.wait()
        dx, dh, update = started.dx, started.dh, None
        if operands.low_rank is not None and travels:
            if operands.folded:
                dx, dh = operands.split_gradient(dx)
            assert dh is not None
            _accumulate_a(operands, source, x, u, statistics, dh, mask)
            if not started.updated:
                update = operands.low_rank.input_update(dh, mask, _local_rows(operands, h, dh))
        full_handle.wait()
        accumulate_base(operands, dy, full, dy)
        du = source.gradient(dx, u, statistics, update, operands.kernels) if needs_du else None
        return (du, None, None, None, *([None] * ctx.num_leaves))


def _input_again(operands: LinearOperands, source: LinearInput, u: Tensor) -> Tensor | None:
    """x, where dW needs it or dA cannot do without it."""
    wants_a = operands.low_rank is not None and not source.gives_a(operands.kernels)
    return source.make(u, None, operands.kernels)[0] if wants_a or operands.trains_weight else None


def _accumulate_a(
    operands: LinearOperands,
    source: LinearInput,
    x: Tensor | None,
    u: Tensor,
    statistics: Tensor | None,
    dh: Tensor | None,
    mask: Tensor | None,
) -> None:
    """dA from x, or from u where there is no x."""
    assert operands.low_rank is not None and dh is not None
    if x is None:
        source.accumulate_a(dh, u, statistics, mask, operands.low_rank, operands.kernels)
    else:
        accumulate_a(dh, x, mask, operands.low_rank, operands.kernels)


def _local_rows(operands: LinearOperands, h: Tensor | None, dh: Tensor) -> Tensor | None:
    """H of the tokens that dH is of: with sequence parallelism H was gathered, and dH is that of this rank's."""
    if h is None or h.shape[0] == dh.shape[0]:
        return h
    return h.narrow(0, operands.axis.rank * dh.shape[0], dh.shape[0])


def _gather_input(
    operands: LinearOperands, x: Tensor | RowCodes, h: Tensor | None
) -> tuple[Tensor | RowCodes, Tensor | None]:
    """All tokens' x and H; one collective where both lie in one buffer."""
    if isinstance(x, RowCodes):
        return _gather_rows(operands, x, h)
    full, handle = all_gather_async(x, operands.axis)
    if h is None or operands.low_rank is None:
        handle.wait()
        return full, None
    if operands.folded:
        handle.wait()
        return full, full[:, operands.in_features : operands.in_features + operands.low_rank.rank]
    full_h, h_handle = all_gather_async(h, operands.axis)
    handle.wait()
    h_handle.wait()
    return full, full_h


def _gather_rows(operands: LinearOperands, x: RowCodes, h: Tensor | None) -> tuple[RowCodes, Tensor | None]:
    """Codes travel in place of numbers: each row has its own scale, so they are those of all tokens' x."""
    codes, handle = all_gather_async(x.codes.view(torch.uint8), operands.axis)
    scale, scale_handle = all_gather_async(x.scale, operands.axis)
    full_h, h_handle = (None, Handle()) if h is None else all_gather_async(h, operands.axis)
    for one in (handle, scale_handle, h_handle):
        one.wait()
    return RowCodes(codes.view(x.codes.dtype), scale), full_h


def _update_after_collective(operands: LinearOperands, gathers: bool) -> bool:
    """Whether dH travels with dX and is complete when it is, so that dX += drop'(dH A) may follow the collective."""
    return gathers or operands.folded or operands.joint or operands.axis.size == 1


def _one_read(operands: LinearOperands, gathers: bool) -> bool:
    """Whether a column linear makes dB together with dH. Where dH travels, dB has a collective to hide instead, which
    saves as much as the second read of dY costs."""
    return operands.one_read and (operands.axis.size == 1 or not _update_after_collective(operands, gathers))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Started:
    """The input gradient of a column linear on its way.

    Args:
        dx: dX, with dH beside it in one buffer where folded; anything where it is not needed.
        dh: dH; None without adapters and where folded.
        handle: to wait for before either is read.
        has_b: dB went to its sinks.
        updated: dX has what the adapters add to it, and no collective is still to complete dH.
    """

    dx: Tensor
    dh: Tensor | None
    handle: Handle
    has_b: bool = False
    updated: bool = False


def _column_input_gradient(
    operands: LinearOperands, dy: Tensor, h: Tensor | None, mask: Tensor | None, needs_dx: bool, gathers: bool
) -> _Started:
    """Starts dX and dH on their way; adds dB to its sinks where it comes from the same read of dY as dH."""
    low_rank, axis = operands.low_rank, operands.axis
    start = reduce_scatter_async if gathers else all_reduce_async
    if operands.folded:
        both, handle = start(operands.input_gradient(dy) if needs_dx else operands.projection_alone(dy), axis)
        return _Started(dx=both, dh=None, handle=handle)
    travels = _update_after_collective(operands, gathers)
    products = operands.adapted(dy, backward=True) if needs_dx else None
    if products is not None and h is not None:
        updates, has_b = not travels or axis.size == 1, True
        dx, dh = operands.adapted_gradient(products, dy, h, mask, updates=updates)
    else:
        updates, has_b = False, _one_read(operands, gathers)
        dh = None if low_rank is None else _projection_gradient(operands, dy, h, one_read=has_b)
        dx = operands.input_gradient(dy) if needs_dx else dy
        if needs_dx and dh is not None and low_rank is not None and not travels:
            dx = operands.kernels.apply_update(dx, low_rank.input_update(dh, mask))
    dh_handle, dx_handle = Handle(), Handle()
    if dh is not None and travels:
        dh, dh_handle = start(dh, axis)
    if needs_dx:
        dx, dx_handle = start(dx, axis)
    return _Started(dx=dx, dh=dh, handle=Handle.both(dh_handle, dx_handle), has_b=has_b, updated=updates)


def _projection_gradient(operands: LinearOperands, dy: Tensor, h: Tensor | None, *, one_read: bool) -> Tensor:
    """dH, and dB in its sinks where one read of dY makes both."""
    assert operands.low_rank is not None and h is not None
    if one_read:
        return output_gradients(dy, h, operands.low_rank, operands.kernels)
    return projection_gradient(dy, operands.low_rank)


class _RowLinear(torch.autograd.Function):
    """The leaves (trainable tensors) are passed only so that autograd knows the output depends on them."""

    @staticmethod
    def forward(
        ctx: Any, u: Tensor, source: LinearInput, operands: LinearOperands, context: TokenContext, *leaves: Tensor
    ) -> Tensor:
        operands = operands.in_context(context)
        axis = operands.axis
        scatters = operands.sequence_parallel and axis.size > 1
        mask = operands.mask(context, context.token_index)
        x, h, statistics = operands.input_and_projection(u, source, mask)
        y, h = operands.expanded_product(x, h, mask)
        y = reduce_scatter(y, axis) if scatters else all_reduce(y, axis)
        if operands.bias_O is not None:
            y.add_(operands.bias_O)
        ctx.save_for_backward(u, statistics, h, mask)
        ctx.source, ctx.operands, ctx.scatters, ctx.num_leaves = source, operands, scatters, len(leaves)
        return y

    @staticmethod
    def backward(ctx: Any, local_dy: Tensor) -> tuple[Any, ...]:
        u, statistics, h, mask = ctx.saved_tensors
        source, operands, low_rank = ctx.source, ctx.operands, ctx.operands.low_rank
        dy, handle = local_dy, Handle()
        if ctx.scatters:
            dy, handle = all_gather_async(local_dy, operands.axis)
        needs_du = ctx.needs_input_grad[0] or bool(source.leaves())
        # made before, x hides the gather; without one dA comes with the gradient for less
        joins = (
            low_rank is not None
            and needs_du
            and not (ctx.scatters or operands.trains_weight)
            and source.joins_a(operands.kernels)
        )
        x = None if joins else _input_again(operands, source, u)
        handle.wait()
        dx, dh, update = _row_input_gradient(operands, dy, h, mask, needs_du)
        if low_rank is not None and not joins:
            _accumulate_a(operands, source, x, u, statistics, dh, mask)
        # the bias is added to this rank's tokens only, after the reduction
        accumulate_base(operands, dy, x, local_dy)
        du = None
        if joins:
            du = source.gradient_and_a(dx, u, update, dh, mask, low_rank, operands.kernels)
        elif dx is not None:
            du = source.gradient(dx, u, statistics, update, operands.kernels)
        return (du, None, None, None, *([None] * ctx.num_leaves))


def _row_input_gradient(
    operands: LinearOperands, dy: Tensor, h: Tensor | None, mask: Tensor | None, needs_dx: bool
) -> tuple[Tensor | None, Tensor | None, InputUpdate | None]:
    """dX (None where it is not needed), dH, and what dX still lacks; dB goes to its sinks."""
    low_rank = operands.low_rank
    if low_rank is None or h is None:
        return (operands.input_gradient(dy) if needs_dx else None), None, None
    products = operands.adapted(dy, backward=True) if needs_dx else None
    if products is not None:
        return *operands.adapted_gradient(products, dy, h, mask, updates=True), None
    dx = None
    if operands.folded and needs_dx:
        dx, dh = operands.split_gradient(operands.input_gradient(dy))
    else:
        dh = _projection_gradient(operands, dy, h, one_read=operands.one_read)
        dx = operands.input_gradient(dy) if needs_dx else None
    if not operands.one_read:
        accumulate_b(dy, h, low_rank, operands.kernels)
    return dx, dh, low_rank.input_update(dh, mask)


def column_linear(
    u: Tensor, source: LinearInput, operands: LinearOperands, context: TokenContext, leaves: tuple[Tensor, ...]
) -> Tensor:
    """Column-parallel linear.

    Args:
        u: what the input is made from: [T, ...], or [T / tp, ...] with sequence parallelism.
        source: how x [T, I] is made from it.
        operands: weights, adapters and axis of this rank.
        context: token coordinates.
        leaves: every tensor in `operands` and `source` that requires a gradient.

    Returns:
        [T, O / tp].
    """
    return _ColumnLinear.apply(u, source, operands, context, *leaves)


def row_linear(
    u: Tensor, source: LinearInput, operands: LinearOperands, context: TokenContext, leaves: tuple[Tensor, ...]
) -> Tensor:
    """Row-parallel linear: x [T, I / tp] -> [T, O], or [T / tp, O] with sequence parallelism. See `column_linear`."""
    return _RowLinear.apply(u, source, operands, context, *leaves)
