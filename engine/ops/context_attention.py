"""Causal attention over documents whose tokens are split over the context axis: one entry, two methods.

| method  | travels                                         | heads                        | work of the ranks     |
|---------|-------------------------------------------------|------------------------------|-----------------------|
| ring    | keys and values that other ranks' queries see,  | any                          | equal for long        |
|         | while blocks are computed                       |                              | documents             |
| ulysses | q, k, v and the output, whatever the documents; | divide over the ranks; k/v   | equal                 |
|         | nothing is computed meanwhile                   | heads may divide their count |                       |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from engine.distributed.mesh import Axis
from engine.ops.attention import Documents
from engine.ops.attention_blocks import AttentionBlocks
from engine.ops.kernels import Attention
from engine.ops.ring_attention import ring_attention
from engine.ops.ulysses_attention import check_context_heads, ulysses_attention
from engine.zigzag import ContextLayout, ContextPlan, make_plan

Method = Literal["ring", "ulysses"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WireBytes:
    """What each rank sends for one attention of one micro-batch.

    Args:
        forward, backward: bytes that leave each rank, in rank order.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]


def bytes_on_the_wire(
    method: Method, layout: ContextLayout, *, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int
) -> WireBytes:
    """Counts what context attention sends; the same on every rank, so that a choice made by it is too.

    Args:
        num_heads, num_kv_heads: on one tensor-parallel rank.
        itemsize: bytes of one element of q, k, v.

    Raises:
        UserError: the method is Ulysses and the heads cannot be spread over the ranks.
    """
    if method == "ring":
        row = 2 * num_kv_heads * head_dim * itemsize
        plans = [make_plan(layout, rank) for rank in range(layout.size)]
        keys = [sum(step.num_sent for step in plan.steps) for plan in plans]
        gradients = [sum(step.num_received for step in plan.steps) for plan in plans]
        return WireBytes(
            forward=tuple(row * sent for sent in keys),
            backward=tuple(row * (sent + home) for sent, home in zip(keys, gradients, strict=True)),
        )
    check_context_heads(num_heads, num_kv_heads, layout.size)
    q_heads, kv_heads = num_heads // layout.size, max(1, num_kv_heads // layout.size)
    head = head_dim * itemsize
    others = layout.size - 1
    counts = layout.token_counts
    # tokens of this rank with the heads of each other rank, and tokens of each other rank with the heads of this one
    split = [others * count * head for count in counts]
    gathered = [(layout.num_tokens - count) * head for count in counts]
    qkv, out = q_heads + 2 * kv_heads, q_heads
    return WireBytes(
        forward=tuple(qkv * there + out * back for there, back in zip(split, gathered, strict=True)),
        backward=tuple(out * there + qkv * back for there, back in zip(split, gathered, strict=True)),
    )


def context_attention(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    plan: ContextPlan,
    axis: Axis,
    *,
    method: Method,
    scale: float,
    blocks: AttentionBlocks,
    attention: Attention,
    documents: Documents,
) -> Tensor:
    """softmax(scale * q k^T) v within each document, each position seeing itself and the ones before.

    Args:
        q_THD: [T, H, D]; k_TKD, v_TKD: [T, K, D], the tokens that `plan` says this rank holds, H a multiple of K.
        plan: this rank's plan of the micro-batch.
        axis: the context axis; on an axis of one rank nothing is sent.
        method: "ring" or "ulysses"; the same on all ranks.
        scale: usually D ** -0.5.
        blocks: the arithmetic of ring attention.
        attention: that of Ulysses, and of an axis of one rank.
        documents: those of the whole micro-batch, as that attention reads them.

    Returns:
        [T, H, D].
    """
    if axis.size == 1:
        return attention(q_THD, k_TKD, v_TKD, documents, scale=scale)
    if method == "ring":
        return ring_attention(q_THD, k_TKD, v_TKD, plan, axis, scale=scale, blocks=blocks)
    return ulysses_attention(q_THD, k_TKD, v_TKD, plan, axis, scale=scale, attention=attention, documents=documents)
