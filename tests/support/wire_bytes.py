"""What context attention sends, counted from the layout alone: what the tests compare its messages with."""

from __future__ import annotations

from dataclasses import dataclass

from engine.ops.attention.context_parallel import Method
from engine.ops.attention.ulysses import check_context_heads
from engine.zigzag import ContextLayout, make_plan


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
