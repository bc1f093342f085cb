"""The loss under a frozen output head, in blocks of tokens: the logits of the whole batch never exist.

    loss_t = log sum_v exp(z_tv) - z_t,label(t),   z = x W^T,   d loss_t / d x_t = (softmax(z_t) - onehot_t) W

Each token's input gradient is linear in the gradient of its loss, so it is computed in forward, while the block's
logits exist, and only multiplied in backward; so is that of its entropy, where it counts. The vocabulary may be split
over the tensor-parallel ranks: three numbers a token cross them in forward, and the input's gradient in backward.

Legend: T tokens, I input features, V vocabulary rows held here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.distributed.collectives import all_gather, all_reduce, reduce_scatter
from engine.kernels.linear_cross_entropy import linear_cross_entropy
from engine.ops.cross_entropy import over_axis
from engine.ops.inputs import LinearInput
from engine.ops.operands import LinearOperands

BLOCK_BYTES = 128 * 2**20
"""Bytes of logits alive at a time, unless the backend asks for more tokens. Small blocks make the product with the
head read its weight more often."""


def block_tokens(bytes_a_token: int, multiple: int) -> int:
    """Returns the tokens of a block: the largest multiple whose logits fit into `BLOCK_BYTES`, but at least one.

    Args:
        bytes_a_token: of a token's logits.
        multiple: `LossKernels.tokens_multiple`.
    """
    return max(1, BLOCK_BYTES // (bytes_a_token * multiple)) * multiple


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
        entropies_T: Tensor | None,
        differentiable: bool,
        *leaves: Tensor,
    ) -> Tensor | tuple[Tensor, Tensor]:
        axis = operands.axis
        gathers = operands.gathers
        local_x, statistics = source.make(u, None, operands.kernels)
        x_TI = all_gather(local_x, axis) if gathers else local_x
        entropy_dx_TI = None
        if differentiable:
            entropies_T = torch.empty(labels_T.shape, dtype=torch.float32, device=x_TI.device)
            entropy_dx_TI = torch.empty_like(x_TI) if needs_gradient else None
        losses_T, dx_TI = linear_cross_entropy(
            x_TI,
            operands.weight_OI,
            labels_T,
            torch.ones_like(labels_T, dtype=torch.float32) if needs_gradient else None,
            operands.kernels.loss,
            first_id=first_id,
            num_ids=num_ids,
            chunk_tokens=block_tokens(
                x_TI.element_size() * operands.weight_OI.shape[0], operands.kernels.loss.tokens_multiple
            ),
            entropies_T=entropies_T,
            entropy_dhidden_TH=entropy_dx_TI,
            **over_axis(axis),
        )
        ctx.save_for_backward(u, statistics, dx_TI, entropy_dx_TI)
        ctx.source, ctx.operands, ctx.gathers, ctx.num_leaves = source, operands, gathers, len(leaves)
        return (losses_T, entropies_T) if differentiable and entropies_T is not None else losses_T

    @staticmethod
    def backward(ctx: Any, dloss_T: Tensor, dentropy_T: Tensor | None = None) -> tuple[Any, ...]:
        u, statistics, dx_TI, entropy_dx_TI = ctx.saved_tensors
        axis = ctx.operands.axis
        dx = dx_TI * dloss_T[:, None].to(dx_TI.dtype)
        if entropy_dx_TI is not None and dentropy_T is not None:
            dx = torch.addcmul(dx, entropy_dx_TI, dentropy_T[:, None].to(dx.dtype))
        dx = reduce_scatter(dx, axis) if ctx.gathers else all_reduce(dx, axis)
        du = ctx.source.gradient(dx, u, statistics, None, ctx.operands.kernels)
        return (du, *([None] * (8 + ctx.num_leaves)))


def frozen_head_losses(
    u: Tensor,
    source: LinearInput,
    operands: LinearOperands,
    labels_T: Tensor,
    *,
    first_id: int,
    num_ids: int,
    leaves: tuple[Tensor, ...],
    entropies_T: Tensor | None = None,
    differentiable: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes the token losses of a head without adapter, bias and trained weight.

    Args:
        u: the tensor from which the head's input is computed, [T, ...], or [T / tp, ...] with sequence parallelism.
        source: the source of x.
        operands: the head's; its weight is split over the vocabulary.
        labels_T: int64 global ids, or IGNORE_LABEL.
        first_id, num_ids: the ids this rank holds.
        leaves: every tensor in `source` that requires a gradient.
        entropies_T: as for `engine.ops.cross_entropy.cross_entropy`.
        differentiable: return the entropies too, as `engine.ops.cross_entropy.losses_and_entropies` does.

    Returns:
        fp32 [T]; 0 where the label is IGNORE_LABEL. Equal on all ranks of the axis.
    """
    needs_gradient = torch.is_grad_enabled() and (u.requires_grad or bool(leaves))
    found: Tensor | tuple[Tensor, Tensor] = _FrozenHeadLoss.apply(
        u, source, operands, labels_T, first_id, num_ids, needs_gradient, entropies_T, differentiable, *leaves
    )
    return found
