"""Causal attention over documents whose tokens are split over the context axis: one entry, two methods.

| method  | sends                                           | heads                        | work of the ranks     |
|---------|-------------------------------------------------|------------------------------|-----------------------|
| ring    | keys and values that other ranks' queries see,  | any                          | equal for long        |
|         | while blocks are computed                       |                              | documents             |
| ulysses | q, k, v and the output, whatever the documents; | divide over the ranks; k/v   | equal                 |
|         | nothing is computed meanwhile                   | heads may divide their count |                       |
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from engine.distributed.mesh import Axis
from engine.kernels.records import Documents
from engine.ops.attention.blocks import AttentionBlocks
from engine.ops.kernels import Attention
from engine.zigzag import ContextPlan

Method = Literal["ring", "ulysses"]


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
    """Computes softmax(scale * q k^T) v within each document, each position seeing itself and the ones before.

    Args:
        q_THD: [T, H, D]; k_TKD, v_TKD: [T, K, D], the tokens that `plan` says this rank holds, H a multiple of K.
        plan: this rank's plan of the micro-batch.
        axis: the context axis; on an axis of one rank nothing is sent.
        method: "ring" or "ulysses"; the same on all ranks.
        scale: usually D ** -0.5.
        blocks: the arithmetic of ring attention.
        attention: that of Ulysses, and of an axis of one rank; where it has sinks, ring attention has them too.
        documents: those of the whole micro-batch, as that attention reads them.

    Returns:
        [T, H, D].
    """
    if axis.size == 1:
        return attention(q_THD, k_TKD, v_TKD, documents, scale=scale)
    if method == "ring":
        from engine.ops.attention.ring import ring_attention
        from engine.ops.attention.sinks import SinkAttention

        sinks = attention.sinks if isinstance(attention, SinkAttention) else None
        return ring_attention(q_THD, k_TKD, v_TKD, plan, axis, scale=scale, blocks=blocks, sinks=sinks)
    from engine.ops.attention.ulysses import ulysses_attention

    return ulysses_attention(q_THD, k_TKD, v_TKD, plan, axis, scale=scale, attention=attention, documents=documents)
