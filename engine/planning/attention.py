"""Bytes of attention between the fused product and the output projection: rotation, scores, and what other ranks send.

Attention keeps q, k, v, its output and the log sum exp; the scores themselves are never written. Legend: w and w_kv
features of the queries and of the keys on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.ops.masked_attention import BLOCK
from engine.planning.ledger import ACTIVATIONS, COMMUNICATION, TEMPORARY, Block, Ledger
from engine.planning.shapes import LayerShape
from engine.planning.sizes import WIDE, Sizes
from engine.zigzag import ContextLayout, make_plan


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextSizes:
    """Tokens whose keys travel over the context axis in each step of ring attention, the rank with most of them.

    Args:
        steps: (sent, received) of each step after the first.
        method: "ring" or "ulysses".
        size: ranks of the axis.
    """

    steps: tuple[tuple[int, int], ...] = ()
    method: str = "ring"
    size: int = 1


def context_sizes(num_rows: int, row_length: int, size: int, method: str, rank: int = 0) -> ContextSizes:
    """Of rows of one document each, which is what sends most."""
    if size == 1:
        return ContextSizes()
    layout = ContextLayout(
        size=size, num_rows=num_rows, row_length=row_length, document_lengths=(row_length,) * num_rows
    )
    steps = tuple((step.num_sent, step.num_received) for step in make_plan(layout, rank).steps[1:])
    return ContextSizes(steps=steps, method=method, size=size)


@dataclass(slots=True)
class AttentionKept:
    """What attention leaves for backward."""

    q: Block | None = None
    k: Block | None = None
    v: Block | None = None
    out: Block | None = None
    lse: Block | None = None
    product: Block | None = None
    """The fused product, where q and k are normalised: the norms keep their inputs, and v is a part of it."""
    norms: Block | None = None

    def blocks(self) -> tuple[Block | None, ...]:
        return self.q, self.k, self.v, self.out, self.lse, self.product, self.norms


class AttentionWalk:
    """Goes through attention with a ledger."""

    def __init__(self, ledger: Ledger, sizes: Sizes, context: ContextSizes) -> None:
        self.ledger, self.sizes, self.context = ledger, sizes, context
        self.row_length = sizes.row_length

    def split(self, layer: LayerShape, qkv: Block) -> AttentionKept:
        """q, k and v leave the fused product rotated and contiguous; plain torch writes half of each in fp32.

        With norms of q and k the product stays, because they keep their inputs and v is a part of it.
        """
        ledger, sizes, kept = self.ledger, self.sizes, AttentionKept()
        half = WIDE // 2
        if layer.qk_norm:
            return (
                self._split_with_wide_norms(layer, qkv)
                if layer.qk_norm_over_all
                else self._split_with_norms(layer, qkv)
            )
        kept.q = ledger.take(ACTIVATIONS, sizes.numbers(sizes.tokens, layer.width))
        kept.k = ledger.take(ACTIVATIONS, sizes.numbers(sizes.tokens, layer.kv_width))
        if sizes.kernels.writes_intermediates:
            ledger.touch(TEMPORARY, half * sizes.tokens * layer.width)
            ledger.touch(TEMPORARY, half * sizes.tokens * layer.kv_width)
        kept.v = ledger.take(ACTIVATIONS, sizes.numbers(sizes.tokens, layer.kv_width))
        ledger.drop(qkv)
        return kept

    def _split_with_norms(self, layer: LayerShape, qkv: Block) -> AttentionKept:
        """Norms within a head. Where they and the rotation are not one pass, a copy of the heads is normalised."""
        ledger, sizes, kept = self.ledger, self.sizes, AttentionKept(product=qkv)
        kept.norms = ledger.take(ACTIVATIONS, WIDE * sizes.tokens * (layer.heads + layer.kv_heads))
        for name, width in (("q", layer.width), ("k", layer.kv_width)):
            if sizes.kernels.fuses_head_norms:
                setattr(kept, name, ledger.take(ACTIVATIONS, sizes.numbers(sizes.tokens, width)))
                continue
            copy = ledger.take(TEMPORARY, sizes.numbers(sizes.tokens, width))
            if sizes.kernels.writes_intermediates:
                self._plain_norm(width)
            setattr(kept, name, ledger.take(ACTIVATIONS, sizes.numbers(sizes.tokens, width)))
            if sizes.kernels.writes_intermediates:
                ledger.touch(TEMPORARY, WIDE // 2 * sizes.tokens * width)
            ledger.drop(copy)
        return kept

    def _plain_norm(self, width: int) -> None:
        """What a norm of several torch operations writes beside its result."""
        n = self.sizes.tokens * width
        self.ledger.touch(TEMPORARY, n * WIDE if self.sizes.is_wide else n * (2 * WIDE + self.sizes.itemsize))

    def _split_with_wide_norms(self, layer: LayerShape, qkv: Block) -> AttentionKept:
        """Norms over all heads together; several torch operations where the heads lie on several ranks."""
        ledger, sizes, kept = self.ledger, self.sizes, AttentionKept(product=qkv)
        kept.norms = ledger.take(ACTIVATIONS, 2 * WIDE * sizes.tokens)
        normed = []
        for width in (layer.width, layer.kv_width):  # both norms come before both rotations
            if sizes.ranks > 1 or sizes.kernels.writes_intermediates:
                self._plain_norm(width)
            normed.append(ledger.take(TEMPORARY, sizes.numbers(sizes.tokens, width)))
        for name, width in (("q", layer.width), ("k", layer.kv_width)):
            setattr(kept, name, ledger.take(ACTIVATIONS, sizes.numbers(sizes.tokens, width)))
            if sizes.kernels.writes_intermediates:
                ledger.touch(TEMPORARY, WIDE // 2 * sizes.tokens * width)
        ledger.drop(*normed)
        return kept

    def attend(self, layer: LayerShape, kept: AttentionKept) -> None:
        """The output like q, and one fp32 log sum exp a head and token."""
        ledger, sizes = self.ledger, self.sizes
        tokens = sizes.tokens
        if self.context.size > 1 and self.context.method == "ring":
            self._ring_forward(layer, kept)
            return
        if self.context.size > 1:
            # heads for tokens: q, k, v packed, received and put in order; the output the same way back
            ledger.touch(COMMUNICATION, 2 * sizes.numbers(tokens, layer.width + 2 * layer.kv_width))
        kept.out = ledger.take(ACTIVATIONS, sizes.numbers(tokens, layer.width))
        kept.lse = ledger.take(ACTIVATIONS, WIDE * tokens * layer.heads)
        # scores, their exponentials, and what a cap or a mask makes of them
        ledger.touch(TEMPORARY, 3 * self._scores(layer))

    def _scores(self, layer: LayerShape) -> int:
        """fp32 scores of one block of queries, which attention with a window or a cap writes; none otherwise."""
        length = self.row_length
        if not layer.softcap and (layer.window is None or length <= layer.window):
            return 0
        queries = min(BLOCK, length)
        keys = length if layer.window is None else min(length, layer.window - 1 + queries)
        return WIDE * layer.heads * queries * keys

    def _keys(self, layer: LayerShape, step: tuple[int, int]) -> Block:
        """Keys and values of one step on their way out and in."""
        return self.ledger.take(COMMUNICATION, 2 * self.sizes.numbers(sum(step), layer.kv_width))

    def _ring_forward(self, layer: LayerShape, kept: AttentionKept) -> None:
        """Two steps' keys at once at most; results are added up in fp32."""
        ledger, sizes, steps = self.ledger, self.sizes, self.context.steps
        n, statistics = sizes.tokens * layer.width, WIDE * sizes.tokens * layer.heads
        arriving = self._keys(layer, steps[0])
        out = ledger.take(ACTIVATIONS, n * WIDE)
        kept.lse = ledger.take(ACTIVATIONS, statistics)
        for index in range(len(steps)):
            following = self._keys(layer, steps[index + 1]) if index + 1 < len(steps) else None
            ledger.touch(TEMPORARY, n * WIDE + statistics)
            ledger.drop(arriving)
            if following is not None:
                arriving = following
        if sizes.is_wide:
            kept.out = out
        else:
            kept.out = ledger.take(ACTIVATIONS, n * sizes.itemsize)
            ledger.drop(out)

    def backward(self, layer: LayerShape, kept: AttentionKept, dout: Block) -> Block:
        """dq, dk, dv beside all that was kept, then the gradient of the fused product beside them.

        Args:
            dout: of attention's output; freed.
        """
        ledger, sizes = self.ledger, self.sizes
        tokens, q, kv = sizes.tokens, layer.width, layer.kv_width
        if self.context.size > 1 and self.context.method == "ring":
            gradients = self._ring_backward(layer)
        else:
            gradients = [ledger.take(TEMPORARY, sizes.numbers(tokens, q + 2 * kv))]
            if self._scores(
                layer
            ):  # gradients in fp32; scores, their exponentials, gradients of both, and slopes of a cap
                wide = 0 if sizes.is_wide else WIDE * tokens * (q + 2 * kv)
                ledger.touch(TEMPORARY, wide + (5 if layer.softcap else 4) * self._scores(layer))
            if sizes.kernels.wide_attention_gradient:
                ledger.touch(TEMPORARY, tokens * (q * WIDE + WIDE * layer.heads) + sizes.numbers(tokens, 2 * q))
        ledger.drop(dout, kept.k, kept.v, kept.q, kept.out, kept.lse)
        whole = ledger.take(TEMPORARY, sizes.numbers(tokens, q + 2 * kv))
        if layer.qk_norm:
            self._norms_backward(layer)
        elif sizes.kernels.writes_intermediates:
            ledger.touch(TEMPORARY, WIDE * tokens * (q + layer.head_dim) // 2)
        ledger.drop(*gradients, kept.product, kept.norms)
        return whole

    def _norms_backward(self, layer: LayerShape) -> None:
        """The gradient turned back, the heads laid out again, and their gradient; those of the queries are the most."""
        sizes, n = self.sizes, self.sizes.tokens * layer.width
        if layer.qk_norm_over_all:
            self.ledger.touch(TEMPORARY, n * (2 * WIDE if sizes.is_wide else 3 * WIDE))
        elif not sizes.kernels.fuses_head_norms:
            plain = 2 * n * WIDE if sizes.kernels.writes_intermediates else 0
            self.ledger.touch(TEMPORARY, 3 * n * sizes.itemsize + plain)

    def _ring_backward(self, layer: LayerShape) -> list[Block]:
        """Gradients in fp32, those of one step beside them, keys of two steps, and gradients on their way home."""
        ledger, sizes, steps = self.ledger, self.sizes, self.context.steps
        tokens, q, kv = sizes.tokens, layer.width, layer.kv_width
        arriving = self._keys(layer, steps[0])
        if not sizes.is_wide:
            ledger.touch(TEMPORARY, sizes.numbers(tokens, q + 2 * kv))
        gradients = [ledger.take(TEMPORARY, WIDE * tokens * (q + 2 * kv))]
        home: Block | None = None
        for index, step in enumerate(steps):
            following = self._keys(layer, steps[index + 1]) if index + 1 < len(steps) else None
            found = ledger.take(TEMPORARY, WIDE * (tokens * q + 2 * step[1] * kv))
            ledger.drop(home)
            home = self._keys(layer, step)
            ledger.drop(found, arriving)
            if following is not None:
                arriving = following
        ledger.drop(home)
        if not sizes.is_wide:
            gradients.append(ledger.take(TEMPORARY, sizes.numbers(tokens, q + 2 * kv)))
        return gradients
