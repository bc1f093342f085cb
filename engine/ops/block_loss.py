"""Losses of whole distributions under an output head, in blocks of tokens: wide logits of the batch never exist.

A `BlockLoss` gets the logits of some tokens and returns their losses and the losses' gradients with respect to these
logits. Each token's gradient is linear in the gradient of its loss, so it is computed in forward, while the block's
logits exist, and only multiplied in backward: under a frozen head as the gradient of the head's input, else over the
logits themselves. The vocabulary may be split over the tensor-parallel ranks.

Legend: T tokens, C tokens of a block, I input features, V vocabulary rows held here, F figures of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.distributed.collectives import all_gather, all_reduce, reduce_scatter
from engine.distributed.mesh import Axis
from engine.ops.head_loss import block_tokens
from engine.ops.inputs import LinearInput
from engine.ops.operands import LinearOperands


class Block(NamedTuple):
    """Some tokens of a micro-batch.

    Args:
        local: those among the rows of the residual stream that this rank holds.
        tokens: the same among the T tokens: with sequence parallelism int64 indices, those of all tensor ranks.
    """

    local: slice
    tokens: slice | Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldVocabulary:
    """The part of the vocabulary that this rank holds.

    Args:
        first_id, num_ids: its ids.
        axis: the axis the vocabulary is split over.
    """

    first_id: int
    num_ids: int
    axis: Axis


class BlockLoss(Protocol):
    """Computes losses of tokens from their logits."""

    @property
    def num_figures(self) -> int:
        """F, the numbers of each token: its loss, and what is reported beside it."""
        ...

    def compute(
        self, logits_CV: Tensor, block: Block, held: HeldVocabulary, *, gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Computes the losses of a block. Collective over the ranks of the vocabulary.

        Args:
            logits_CV: at least fp32, capped; may be overwritten.
            block: its tokens.
            held: the ids of the logits.
            gradient: whether the gradient is wanted.

        Returns:
            fp32 [C, F] figures, equal on all ranks, the loss first, and the gradient of each token's loss, [C, V];
            None where it is not wanted.
        """
        ...


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        source: LinearInput,
        operands: LinearOperands,
        loss: BlockLoss,
        held: HeldVocabulary,
        cap: float | None,
        needs_gradient: bool,
        *leaves: Tensor,
    ) -> Tensor:
        axis, gathers = operands.axis, operands.gathers
        local_x, statistics = source.make(u, None, operands.kernels)
        weight_VI, product = operands.weight_OI[: held.num_ids], operands.kernels.loss.product
        count = len(local_x) * (axis.size if gathers else 1)
        figures_TF = _figures(loss, count, u)
        dx_TI = local_x.new_empty(count, local_x.shape[1]) if needs_gradient else None
        for block in blocks(len(local_x), axis if gathers else None, operands.weight_OI.shape[0], u):
            x_CI = local_x[block.local]
            x_CI = all_gather(x_CI, axis) if gathers else x_CI
            logits_CV = _wide(product(x_CI, weight_VI.t()))
            figures, dlogits_CV = _computed(loss, logits_CV, block, held, cap, gradient=needs_gradient)
            figures_TF[block.tokens] = figures
            if dx_TI is not None and dlogits_CV is not None:
                dx_TI[block.tokens] = product(dlogits_CV.to(x_CI.dtype), weight_VI)
        ctx.save_for_backward(u, statistics, dx_TI)
        ctx.source, ctx.operands, ctx.num_leaves = source, operands, len(leaves)
        return figures_TF

    @staticmethod
    def backward(ctx: Any, dfigures_TF: Tensor) -> tuple[Any, ...]:
        u, statistics, dx_TI = ctx.saved_tensors
        axis = ctx.operands.axis
        dx = dx_TI * dfigures_TF[:, :1].to(dx_TI.dtype)
        dx = reduce_scatter(dx, axis) if ctx.operands.gathers else all_reduce(dx, axis)
        du = ctx.source.gradient(dx, u, statistics, None, ctx.operands.kernels)
        return (du, *([None] * (6 + ctx.num_leaves)))


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        gathers: bool,
        loss: BlockLoss,
        held: HeldVocabulary,
        cap: float | None,
        needs_gradient: bool,
    ) -> Tensor:
        axis = held.axis
        figures_TF = _figures(loss, len(logits_TV), logits_TV)
        own, padding = logits_TV[:, : held.num_ids], logits_TV[:, held.num_ids :]
        local = len(logits_TV) // axis.size if gathers else len(logits_TV)
        for block in blocks(local, axis if gathers else None, logits_TV.shape[1], logits_TV):
            wide_CV = own[block.tokens].to(torch.promote_types(own.dtype, torch.float32), copy=True)
            figures, dlogits_CV = _computed(loss, wide_CV, block, held, cap, gradient=needs_gradient)
            figures_TF[block.tokens] = figures
            if dlogits_CV is not None:
                own[block.tokens] = dlogits_CV.to(own.dtype)
        padding.zero_()
        ctx.save_for_backward(logits_TV)
        return figures_TF

    @staticmethod
    def backward(ctx: Any, dfigures_TF: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_TV,) = ctx.saved_tensors
        return (gradient_TV.mul_(dfigures_TF[:, :1].to(gradient_TV.dtype)), *([None] * 5))


def frozen_head_block_losses(
    u: Tensor,
    source: LinearInput,
    operands: LinearOperands,
    loss: BlockLoss,
    *,
    held: HeldVocabulary,
    cap: float | None,
    leaves: tuple[Tensor, ...],
) -> Tensor:
    """Computes a loss of distributions under a head without adapter, bias and trained weight.

    Args:
        u, source, operands, leaves: as for `engine.ops.head_loss.frozen_head_losses`.
        loss: of the tokens.
        held: the ids this rank holds.
        cap: soft cap of the logits; None where there is none.

    Returns:
        fp32 [T, F], of which the first figure is differentiable. Equal on all ranks of the axis.
    """
    needs_gradient = torch.is_grad_enabled() and (u.requires_grad or bool(leaves))
    return _FrozenHead.apply(u, source, operands, loss, held, cap, needs_gradient, *leaves)


def block_losses(
    logits_TV: Tensor, loss: BlockLoss, *, gathers: bool, held: HeldVocabulary, cap: float | None
) -> Tensor:
    """Computes a loss of distributions from logits, which it consumes: backward runs once.

    Args:
        logits_TV: [T, V], this rank's vocabulary rows, padding columns included.
        gathers: whether they are of a residual stream that is split over the ranks of the vocabulary.
        loss, held, cap: as for `frozen_head_block_losses`.

    Returns:
        As `frozen_head_block_losses`.
    """
    needs_gradient = torch.is_grad_enabled() and logits_TV.requires_grad
    return _Logits.apply(logits_TV, gathers, loss, held, cap, needs_gradient)


def blocks(num_local: int, gathers: Axis | None, num_rows: int, like: Tensor) -> Iterator[Block]:
    """Yields the blocks of a micro-batch.

    Args:
        num_local: rows of the residual stream that this rank holds.
        gathers: the axis over which the stream is split; None where it is whole.
        num_rows: of the vocabulary here.
        like: of the device and the dtype of the model.
    """
    ranks = 1 if gathers is None else gathers.size
    wide = torch.promote_types(like.dtype, torch.float32).itemsize
    size = max(1, block_tokens(wide * num_rows, 1) // ranks)
    for start in range(0, num_local, size):
        local = slice(start, min(start + size, num_local))
        if gathers is None:
            yield Block(local, local)
            continue
        first_R = torch.arange(ranks, device=like.device)[:, None] * num_local
        yield Block(local, (first_R + torch.arange(local.start, local.stop, device=like.device)).flatten())


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _figures(loss: BlockLoss, count: int, like: Tensor) -> Tensor:
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.empty(count, loss.num_figures, dtype=dtype, device=like.device)


def _computed(
    loss: BlockLoss, logits_CV: Tensor, block: Block, held: HeldVocabulary, cap: float | None, *, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns the figures of a block, and the gradient with respect to its logits before the soft cap."""
    if cap is None:
        return loss.compute(logits_CV, block, held, gradient=gradient)
    capped_CV = logits_CV.div_(cap).tanh_()
    slope_CV = 1.0 - capped_CV.square() if gradient else None
    figures, dlogits_CV = loss.compute(capped_CV.mul_(cap), block, held, gradient=gradient)
    return figures, None if dlogits_CV is None or slope_CV is None else dlogits_CV.mul_(slope_CV)
