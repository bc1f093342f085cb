"""Ulysses attention: the ranks exchange heads for tokens, attend over whole documents, and exchange back.

Between the two exchanges a rank has all tokens of 1 / c of the heads, so that any attention function serves and the
work is the same on every rank whatever the documents. Where there are fewer key/value heads than ranks, each head is
sent to the c / K ranks whose query heads read it. Tokens lie zig-zag outside, as for ring attention, so that the
loader has one rule; after the first exchange they are put into their plain order.

Legend: T this rank's tokens, S those of all ranks, H query heads, K key/value heads, D head size, c ranks; n heads a
rank has of some tensor between the exchanges.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.distributed.collectives import all_to_all
from engine.distributed.mesh import Axis
from engine.errors import UserError
from engine.kernels.records import Documents
from engine.ops.kernels import Attention
from engine.spans import Span
from engine.zigzag import ContextPlan


def check_context_heads(num_heads: int, num_kv_heads: int, context_size: int) -> None:
    """Checks that the heads of one tensor-parallel rank can be spread over `context_size` ranks.

    Raises:
        UserError: they cannot; names both counts.
    """
    if num_heads % context_size:
        raise UserError(
            f"Ulysses attention gives each context rank as many heads, but {num_heads} attention heads on a tensor "
            f"rank do not divide over parallel.context {context_size}: use a parallel.context that divides "
            f"{num_heads}, or ring attention."
        )
    if num_kv_heads % context_size and context_size % num_kv_heads:
        raise UserError(
            f"Ulysses attention cannot spread {num_kv_heads} key/value heads on a tensor rank over parallel.context "
            f"{context_size}, which is neither a divisor nor a multiple: use one that is, or ring attention."
        )


def _in_order(x: Tensor, spans: tuple[Span, ...]) -> Tensor:
    return torch.cat([x[start:stop] for start, stop in spans])


def _split_heads(tensors: tuple[Tensor, ...], plan: ContextPlan, axis: Axis) -> tuple[Tensor, ...]:
    """Exchanges each [T, c n, D] -> [S, n, D]: rank i's heads of all tokens in their plain order. All in one
    exchange."""
    size, tokens = axis.size, plan.num_tokens
    heads = [x.shape[1] // size for x in tensors]
    packed = tensors[0].new_empty(size, tokens, sum(heads), tensors[0].shape[2])
    for part, x in zip(packed.split(heads, dim=2), tensors, strict=True):
        part.copy_(x.unflatten(1, (size, -1)).transpose(0, 1))
    received = all_to_all(packed.flatten(0, 1), axis, sent=[tokens] * size, received=plan.layout.token_counts)
    return tuple(_in_order(part, plan.plain_order) for part in received.split(heads, dim=1))


def _gather_heads(tensors: tuple[Tensor, ...], plan: ContextPlan, axis: Axis) -> tuple[Tensor, ...]:
    """Exchanges back: each [S, n, D] -> [T, c n, D]. All in one exchange."""
    size, tokens = axis.size, plan.num_tokens
    heads = [x.shape[1] for x in tensors]
    packed = _in_order(tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1), plan.rank_order)
    received = all_to_all(packed, axis, sent=plan.layout.token_counts, received=[tokens] * size)
    parts = received.unflatten(0, (size, tokens)).split(heads, dim=2)
    return tuple(part.transpose(0, 1).flatten(1, 2) for part in parts)


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: ContextPlan, axis: Axis, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.plan, ctx.axis = plan, axis
        return _split_heads(tensors, plan, axis)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *_gather_heads(gradients, ctx.plan, ctx.axis)


class _GatherHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: ContextPlan, axis: Axis, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.plan, ctx.axis = plan, axis
        return _gather_heads(tensors, plan, axis)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *_split_heads(gradients, ctx.plan, ctx.axis)


def ulysses_attention(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    plan: ContextPlan,
    axis: Axis,
    *,
    scale: float,
    attention: Attention,
    documents: Documents,
) -> Tensor:
    """Computes causal attention within documents of tokens that are split zig-zag over `axis`.

    Args:
        q_THD: [T, H, D]; k_TKD, v_TKD: [T, K, D], this rank's tokens with H a multiple of K; head h reads key/value
            head h // (H / K).
        plan: this rank's plan of the micro-batch.
        axis: the context axis, of two ranks or more; every rank calls this, and its backward, in the same order.
        scale: usually D ** -0.5.
        attention: causal attention within documents on one rank.
        documents: those of the whole micro-batch, as that attention reads them.

    Returns:
        [T, H, D].

    Raises:
        UserError: the heads cannot be spread over the axis.
    """
    assert (plan.layout.size, plan.rank) == (axis.size, axis.rank), (plan.layout.size, plan.rank, axis)
    assert q_THD.shape[0] == plan.num_tokens, (q_THD.shape, plan.num_tokens)
    check_context_heads(q_THD.shape[1], k_TKD.shape[1], axis.size)
    copies = max(1, axis.size // k_TKD.shape[1])
    if copies > 1:
        k_TKD, v_TKD = (x.repeat_interleave(copies, dim=1) for x in (k_TKD, v_TKD))
    q, k, v = _SplitHeads.apply(plan, axis, q_THD, k_TKD, v_TKD)
    out = attention(q, k, v, documents, scale=scale)
    return _GatherHeads.apply(plan, axis, out)[0]
