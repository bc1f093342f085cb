"""The loss under a frozen output head, in blocks of tokens: the logits of the whole batch never exist.

    loss_t = log sum_v exp(z_tv) - z_t,label(t),   z = x W^T,   d loss_t / d x_t = (softmax(z_t) - onehot_t) W

Each token's gradient is linear in what reaches its loss from above, so it is computed in forward, while the block's
logits are at hand, and only multiplied in backward. The vocabulary may be split over the tensor-parallel ranks: three
numbers a token cross them in forward, and the input's gradient in backward.

Legend: T tokens, I input features, V vocabulary rows held here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.distributed.collectives import all_gather, all_reduce, reduce_scatter
from engine.ops.cross_entropy import shard_losses
from engine.ops.inputs import LinearInput
from engine.ops.operands import LinearOperands

BLOCK_BYTES = 128 * 2**20
"""Of fp32 logits alive at a time. Small blocks make the product with the head read its weight more often."""


class _FrozenHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        source: LinearInput,
        operands: LinearOperands,
        labels_T: Tensor,
        first_id: int,
        num_ids: int,
        needs_gradient: bool,
        *leaves: Tensor,
    ) -> Tensor:
        axis = operands.axis
        gathers = operands.sequence_parallel and axis.size > 1
        local_x, statistics = source.make(u, None, operands.kernels)
        x_TI = all_gather(local_x, axis) if gathers else local_x
        losses_T = torch.empty(x_TI.shape[0], dtype=torch.float32, device=x_TI.device)
        dx_TI = torch.empty_like(x_TI) if needs_gradient else None
        block = max(1, BLOCK_BYTES // (4 * operands.weight_OI.shape[0]))
        for start in range(0, x_TI.shape[0], block):
            part = slice(start, start + block)
            dx = dx_TI[part] if dx_TI is not None else None
            losses_T[part] = _block(x_TI[part], operands, labels_T[part], first_id, num_ids, dx)
        ctx.save_for_backward(u, statistics, dx_TI)
        ctx.source, ctx.operands, ctx.gathers, ctx.num_leaves = source, operands, gathers, len(leaves)
        return losses_T

    @staticmethod
    def backward(ctx: Any, dloss_T: Tensor) -> tuple[Any, ...]:
        u, statistics, dx_TI = ctx.saved_tensors
        axis = ctx.operands.axis
        dx = dx_TI * dloss_T[:, None].to(dx_TI.dtype)
        dx = reduce_scatter(dx, axis) if ctx.gathers else all_reduce(dx, axis)
        du = ctx.source.gradient(dx, u, statistics, None, ctx.operands.kernels)
        return (du, *([None] * (6 + ctx.num_leaves)))


def _block(
    x_TI: Tensor, operands: LinearOperands, labels_T: Tensor, first_id: int, num_ids: int, dx_TI: Tensor | None
) -> Tensor:
    """Losses of a block of tokens [T], and into `dx_TI` each token's gradient for a unit gradient of its loss."""
    logits = (x_TI @ operands.weight_OI.t()).to(torch.float32)
    found = shard_losses(logits, labels_T, first_id, num_ids, operands.axis, operands.kernels)
    if dx_TI is not None:
        unit = found.counted_T.to(torch.float32)
        gradient = operands.kernels.loss_backward(logits, found.targets_T, found.total_T, unit)
        torch.mm(gradient.to(x_TI.dtype), operands.weight_OI, out=dx_TI)
    return found.losses_T


def frozen_head_losses(
    u: Tensor,
    source: LinearInput,
    operands: LinearOperands,
    labels_T: Tensor,
    *,
    first_id: int,
    num_ids: int,
    leaves: tuple[Tensor, ...],
) -> Tensor:
    """Token losses of a head without adapter, bias and trained weight.

    Args:
        u: what the head's input is made from, [T, ...], or [T / tp, ...] with sequence parallelism.
        source: how x is made from it.
        operands: the head's; its weight is split over the vocabulary.
        labels_T: int64 global ids, or IGNORE_LABEL.
        first_id, num_ids: the ids this rank holds.
        leaves: every tensor in `source` that requires a gradient.

    Returns:
        fp32 [T]; 0 where the label is IGNORE_LABEL. Equal on all ranks of the axis.
    """
    needs_gradient = torch.is_grad_enabled() and (u.requires_grad or bool(leaves))
    return _FrozenHeadLoss.apply(u, source, operands, labels_T, first_id, num_ids, needs_gradient, *leaves)
