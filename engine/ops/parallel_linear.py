"""Tensor-parallel linears with the low-rank path inside and every collective in sight.

    y = x W^T + b + H B^T,   H = s * drop(x) A^T,   x made from u (a norm, SwiGLU, or u itself)

Column: W [O / tp, I], B rows split with it, A whole on every rank. Row: W [O, I / tp], A columns split with it, B whole
on every rank; the low-rank term is added before the one reduction, the bias after it. Base and adapters are
multiplied by the linear's way (ops.products); the collectives between are here.

Which gradients backward leaves as partial sums over the tensor-parallel ranks depends on where H is made:

| case                                                                   | dA       | dB       |
|------------------------------------------------------------------------|----------|----------|
| column, H from the full x on every rank, dH kept local (LOCAL)          | sum      | complete |
| column, [dX, dH] all-reduced together (JOINT; always where folded)      | complete | complete |
| column with sequence parallelism: H from the token shard, x and H       |          |          |
|   gathered, dX and dH reduce-scattered                                  | sum      | complete |
| row, with or without sequence parallelism                              | complete | sum      |

The layers record this in each factor's ShardSpec; the optimizer sums accordingly, once per step.
With sequence parallelism a column linear's input, and a row linear's output, hold this rank's T / tp tokens.
x is not kept for backward unless it is u: it is recomputed there (see ops.inputs).

Legend: T tokens, I input features, O output features, R stacked adapter rows; all of this rank unless said otherwise.
"""

from __future__ import annotations

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
from engine.ops.attention.token_context import TokenContext
from engine.ops.inputs import LinearInput, SummedInput, input_gradient
from engine.ops.operands import Inputs, LinearOperands, OutputGradient, Update, accumulate_base
from engine.ops.products import FOLDED, SEPARATE, in_context
from engine.ops.quantized_products import RowCodes


class _ColumnLinear(torch.autograd.Function):
    """The leaves (trainable tensors) are passed only so that autograd knows the output depends on them."""

    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        added: Tensor | None,
        source: LinearInput,
        operands: LinearOperands,
        context: TokenContext,
        passes: bool,
        *leaves: Tensor,
    ) -> Any:
        """Returns y; where u `passes` it too, or u + added."""
        stream, u, operands = u, _along_features(u), in_context(operands, context)
        way, gathers = operands.forward_way, operands.gathers
        mask = operands.mask(context, context.local_token_index if gathers else context.token_index)
        if added is None:
            made = way.inputs(operands, u, source, mask, gathers=gathers)
        else:
            summed = SummedInput(source, _along_features(added))
            made = way.inputs(operands, u, summed, mask, gathers=gathers)
            assert summed.total is not None
            u = stream = summed.total
        if gathers:
            made = _gather_inputs(operands, made)
        y, h = way.outputs(operands, made, mask)
        if operands.bias_O is not None:
            y.add_(operands.bias_O)
        ctx.save_for_backward(u, made.statistics, h, mask)
        ctx.source, ctx.operands, ctx.num_leaves = source, operands, len(leaves)
        ctx.sums = added is not None
        if not passes:
            return y
        return y, stream if added is not None else stream.view_as(stream)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, residual: Tensor | None = None) -> tuple[Any, ...]:
        dy = _along_features(dy)
        u, statistics, h, mask = ctx.saved_tensors
        source, operands, low_rank = ctx.source, ctx.operands, ctx.operands.low_rank
        way, axis, gathers = operands.backward_way, operands.axis, operands.gathers
        needs_du = any(ctx.needs_input_grad[:2]) or bool(source.leaves())
        dh_with_dx = gathers or operands.joint or axis.size == 1
        update: Update = "now" if not dh_with_dx else "any time" if axis.size == 1 else "later"
        made = way.gradients(operands, OutputGradient(dy, h, mask, needs_du, update))
        added_db, has_update = made.added_db, made.has_update
        parts, handle = _start_gradients(operands, made.parts, dh_with_dx=dh_with_dx, has_dx=needs_du)
        del made  # the whole dX is free as soon as its reduction is over
        if h is not None and low_rank is not None and not added_db:
            low_rank.accumulate_b(dy, h, operands.kernels)  # hides the collective
        x = _recomputed_input(operands, source, u)
        full, full_handle = x, Handle()
        if operands.trains_weight and x is not None and gathers:
            full, full_handle = all_gather_async(x, axis)
        if low_rank is not None and not dh_with_dx:
            _accumulate_a(operands, source, x, u, statistics, parts[0], mask)  # dH stays here; hides the collective
        handle.wait()
        dx, dh = way.received(operands, parts, needs_dx=needs_du)
        adds = None
        if low_rank is not None and dh_with_dx:
            assert dh is not None
            _accumulate_a(operands, source, x, u, statistics, dh, mask)
            if not has_update and dx is not None:
                dx, adds = low_rank.updated(dx, dh, mask, _local_rows(operands, h, dh), operands.kernels)
        full_handle.wait()
        accumulate_base(operands, dy, full, dy)
        du = input_gradient(source, residual, dx, u, statistics, adds, operands.kernels) if needs_du else None
        return (du, du if ctx.sums else None, None, None, None, None, *([None] * ctx.num_leaves))


def _along_features(rows: Tensor) -> Tensor:
    """Returns rows as kernels take them, each one's features side by side; a transposed product's are not."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _start_gradients(
    operands: LinearOperands, parts: tuple[Tensor, ...], *, dh_with_dx: bool, has_dx: bool
) -> tuple[tuple[Tensor, ...], Handle]:
    """Starts the sum over tensor ranks: of all parts, or of dX alone where dH stays here."""
    start = reduce_scatter_async if operands.gathers else all_reduce_async
    done, handles = [], []
    for index, part in enumerate(parts):
        if dh_with_dx or (has_dx and index == len(parts) - 1):
            part, handle = start(part, operands.axis)
            handles.append(handle)
        done.append(part)
    return tuple(done), Handle.all(handles)


def _recomputed_input(operands: LinearOperands, source: LinearInput, u: Tensor) -> Tensor | None:
    """Recomputes x, where dW needs it or dA cannot do without it."""
    low_rank = operands.low_rank
    wants_a = low_rank is not None and not (low_rank.is_one and source.computes_da_from_u(operands.kernels))
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
    """Adds dA to its sinks, from x, or from u where there is no x."""
    assert operands.low_rank is not None and dh is not None
    if x is None:
        source.accumulate_a(dh, u, statistics, mask, operands.low_rank, operands.kernels)
    else:
        operands.low_rank.accumulate_a(dh, x, mask, operands.kernels)


def _local_rows(operands: LinearOperands, h: Tensor | None, dh: Tensor) -> Tensor | None:
    """Returns H of the tokens that dH is of: with sequence parallelism H was gathered, and dH is of this rank's."""
    if h is None or h.shape[0] == dh.shape[0]:
        return h
    return h.narrow(0, operands.axis.rank * dh.shape[0], dh.shape[0])


def _gather_inputs(operands: LinearOperands, made: Inputs) -> Inputs:
    """Gathers all tokens' x and H; one collective where both lie in one buffer."""
    if isinstance(made.x, RowCodes):
        return _gather_rows(operands, made.x, made)
    full, handle = all_gather_async(made.x, operands.axis)
    if made.h is None or operands.low_rank is None:
        handle.wait()
        return made._replace(x=full, h=None)
    if operands.forward_way is FOLDED:
        handle.wait()
        return made._replace(x=full, h=operands.projection_in(full))
    full_h, h_handle = all_gather_async(made.h, operands.axis)
    handle.wait()
    h_handle.wait()
    return made._replace(x=full, h=full_h)


def _gather_rows(operands: LinearOperands, x: RowCodes, made: Inputs) -> Inputs:
    """Gathers codes in place of numbers: each row has its own scale, so they are those of all tokens' x."""
    codes, handle = all_gather_async(x.codes.view(torch.uint8), operands.axis)
    scale, scale_handle = all_gather_async(x.scale, operands.axis)
    full_h, h_handle = (None, Handle()) if made.h is None else all_gather_async(made.h, operands.axis)
    for one in (handle, scale_handle, h_handle):
        one.wait()
    return made._replace(x=RowCodes(codes.view(x.codes.dtype), scale), h=full_h)


class _RowLinear(torch.autograd.Function):
    """The leaves (trainable tensors) are passed only so that autograd knows the output depends on them."""

    @staticmethod
    def forward(
        ctx: Any, u: Tensor, source: LinearInput, operands: LinearOperands, context: TokenContext, *leaves: Tensor
    ) -> Tensor:
        u, operands = _along_features(u), in_context(operands, context)
        way, axis = operands.forward_way, operands.axis
        mask = operands.mask(context, context.token_index)
        made = way.inputs(operands, u, source, mask, gathers=False)
        y, h = way.outputs(operands, made, mask)
        y = reduce_scatter(y, axis) if operands.gathers else all_reduce(y, axis)
        if operands.bias_O is not None:
            y.add_(operands.bias_O)
        ctx.save_for_backward(u, made.statistics, h, mask)
        ctx.source, ctx.operands, ctx.num_leaves = source, operands, len(leaves)
        return y

    @staticmethod
    def backward(ctx: Any, local_dy: Tensor) -> tuple[Any, ...]:
        u, statistics, h, mask = ctx.saved_tensors
        source, operands, low_rank = ctx.source, ctx.operands, ctx.operands.low_rank
        local_dy = _along_features(local_dy)
        dy, handle = local_dy, Handle()
        if operands.gathers:
            dy, handle = all_gather_async(local_dy, operands.axis)
        needs_du = ctx.needs_input_grad[0] or bool(source.leaves())
        # made before, x hides the gather; without one dA comes with the gradient for less
        fuses_da = (
            low_rank is not None
            and low_rank.is_one
            and needs_du
            and not (operands.gathers or operands.trains_weight)
            and source.fuses_da(operands.kernels)
        )
        x = None if fuses_da else _recomputed_input(operands, source, u)
        handle.wait()
        way = operands.backward_way if needs_du else SEPARATE
        made = way.gradients(operands, OutputGradient(dy, h, mask, needs_du, "any time"))
        dx, dh = way.received(operands, made.parts, needs_dx=needs_du)
        update = None
        if low_rank is not None and h is not None and dh is not None:
            if not made.added_db:
                low_rank.accumulate_b(dy, h, operands.kernels)
            if not made.has_update and dx is not None:
                dx, update = low_rank.updated(dx, dh, mask, None, operands.kernels)
        if low_rank is not None and not fuses_da:
            _accumulate_a(operands, source, x, u, statistics, dh, mask)
        # the bias is added to this rank's tokens only, after the reduction
        accumulate_base(operands, dy, x, local_dy)
        du = None
        if fuses_da:
            du = source.gradient_and_da(dx, u, update, dh, mask, low_rank, operands.kernels)
        elif dx is not None:
            du = source.gradient(dx, u, statistics, update, operands.kernels)
        return (du, None, None, None, *([None] * ctx.num_leaves))


def column_linear(
    u: Tensor, source: LinearInput, operands: LinearOperands, context: TokenContext, leaves: tuple[Tensor, ...]
) -> Tensor:
    """Computes a column-parallel linear. A stream that is u is handed on, see engine.ops.inputs.Stream.

    Args:
        u: the tensor from which the input is computed: [T, ...], or [T / tp, ...] with sequence parallelism.
        source: the source of x [T, I].
        operands: weights, adapters and axis of this rank.
        context: token coordinates.
        leaves: every tensor in `operands` and `source` that requires a gradient.

    Returns:
        [T, O / tp].
    """
    leaves = (*leaves, *_chosen_leaves(operands, context))
    stream = source.stream
    if stream is None or not stream.passes(u):
        return _ColumnLinear.apply(u, None, source, operands, context, False, *leaves)
    y, handed_on = _ColumnLinear.apply(u, stream.added, source, operands, context, True, *leaves)
    stream.hand_on(handed_on)
    return y


def row_linear(
    u: Tensor, source: LinearInput, operands: LinearOperands, context: TokenContext, leaves: tuple[Tensor, ...]
) -> Tensor:
    """Computes a row-parallel linear, [T, I / tp] -> [T, O], or [T / tp, O] with sequence parallelism; see above."""
    return _RowLinear.apply(u, source, operands, context, *leaves, *_chosen_leaves(operands, context))


def _chosen_leaves(operands: LinearOperands, context: TokenContext) -> tuple[Tensor, ...]:
    return () if context.choice is None else context.choice.leaves(operands.name)
