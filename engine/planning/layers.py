"""Bytes of a decoder layer's forward and backward, in the order of `engine.models.decoder`, under each recompute level.

| level     | kept of a layer beside its input                                                                  |
|-----------|---------------------------------------------------------------------------------------------------|
| none      | as selective, and the inputs of three linears with H beside them                                  |
| selective | q, k, v, attention's output, the residual stream after it, [gate | up], H, masks and statistics   |
| attention | the residual stream after attention, [gate | up], and H, mask and statistics of the MLP           |
| full      | nothing                                                                                           |
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from engine.layers.recompute import Level
from engine.layers.rounding import FLOAT8
from engine.planning.attention import AttentionKept, AttentionWalk, ContextSizes
from engine.planning.ledger import ACTIVATIONS, TEMPORARY, Block, Ledger
from engine.planning.linears import LinearKept, LinearWalk, Source
from engine.planning.shapes import LayerShape
from engine.planning.sizes import WIDE, Sizes


@dataclass(frozen=True, slots=True)
class Policy:
    """What a level does.

    Args:
        keeps_inputs: three linears keep their input.
        again: the part of the layer that backward runs a second time.
    """

    keeps_inputs: bool = False
    again: tuple[str, ...] = ()


POLICIES: dict[Level, Policy] = {
    "none": Policy(keeps_inputs=True),
    "selective": Policy(),
    "attention": Policy(again=("attention",)),
    "full": Policy(again=("attention", "mlp")),
}
"""A new level is an entry here, and, where it makes other regions again, their order in `LayerWalk`."""


@dataclass(slots=True)
class LayerKept:
    """What one layer leaves for backward; its input belongs to whoever made it."""

    qkv: LinearKept = field(default_factory=LinearKept)
    attention: AttentionKept = field(default_factory=AttentionKept)
    out: LinearKept = field(default_factory=LinearKept)
    out_norm: tuple[Block | None, Block | None] = (None, None)
    """What a norm on attention's output keeps: that output, and its statistics."""
    middle: Block | None = None
    """The residual stream after attention."""
    gate_up: LinearKept = field(default_factory=LinearKept)
    activated: Block | None = None
    """[gate | up]."""
    down: LinearKept = field(default_factory=LinearKept)
    down_norm: tuple[Block | None, Block | None] = (None, None)

    def blocks(self) -> list[Block]:
        """All that is there."""
        found = (
            *self.qkv.blocks(), *self.attention.blocks(), *self.out.blocks(), *self.out_norm, self.middle,
            *self.gate_up.blocks(), self.activated, *self.down.blocks(), *self.down_norm,
        )  # fmt: skip
        return [block for block in found if block is not None]


@dataclass(frozen=True, slots=True)
class Needs:
    """Which tensors of a layer need a gradient: all that follow something trainable."""

    x: bool
    qkv: bool
    middle: bool
    gate_up: bool
    output: bool


def needs_of(layer: LayerShape, x: bool) -> Needs:
    """Of a layer whose input does, or does not, need one."""
    qkv = x or layer.qkv.has_leaves or layer.trains_input_norm or layer.trains_head_norms
    middle = x or qkv or layer.out.has_leaves or layer.trains_output_norms
    gate_up = middle or layer.gate_up.has_leaves or layer.trains_post_norm
    return Needs(x, qkv, middle, gate_up, gate_up or layer.down.has_leaves)


def _source(layer: LayerShape) -> Source:
    """What the inputs of attention and MLP are made by."""
    return "norm" if layer.input_norms else "given"


class LayerWalk:
    """Goes through layers with a ledger.

    Args:
        ledger: to write into.
        sizes, context: of the rank.
        hidden: features of the residual stream.
        defers: see LinearWalk.
        stored_dtype: that activations are kept in, where it is not their own.
    """

    def __init__(
        self, ledger: Ledger, sizes: Sizes, context: ContextSizes, hidden: int, *, defers: bool = False,
        stored_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.ledger, self.sizes, self.hidden = ledger, sizes, hidden
        self._stored_dtype = stored_dtype
        self._linear = LinearWalk(ledger, sizes, defers=defers)
        self._attention = AttentionWalk(ledger, sizes, context)

    def stream(self, part: str = ACTIVATIONS) -> Block:
        """The residual stream of this rank's tokens."""
        return self.ledger.take(part, self.sizes.numbers(self.sizes.local, self.hidden))

    # Forward.

    def forward(
        self, layer: LayerShape, level: Level, needs: Needs, x: Block, *, keeps_x: bool
    ) -> tuple[Block, LayerKept, Block | None]:
        """The layer's output, what it keeps, and its input as it is kept, which may be rounded.

        Args:
            x: freed where it is not kept.
        """
        policy, kept = POLICIES[level], LayerKept()
        again = policy.again
        self._attention_forward(layer, policy, needs, kept, saved="attention" not in again)
        rounded = self._rounded_attention(layer, kept, x if keeps_x else None)
        output = self._mlp_forward(layer, policy, needs, kept, saved="mlp" not in again)
        assert output is not None
        if not needs.gate_up or "mlp" in again:
            self.ledger.drop(kept.middle)
            kept.middle = None
        if rounded is None:
            self.ledger.drop(None if keeps_x else x)
            return output, kept, x if keeps_x else None
        # what was rounded lives until the layer is done
        middle, activated = self._rounded(kept.middle), self._rounded(kept.activated)
        attention = kept.attention
        self.ledger.drop(x, kept.middle, kept.activated, attention.q, attention.k, attention.v, attention.out)
        kept.middle, kept.activated = middle, activated
        kept_x, attention.q, attention.k, attention.v, attention.out = rounded
        return output, kept, kept_x

    # Rounding, see engine.layers.saved.

    def _rounded_attention(self, layer: LayerShape, kept: LayerKept, x: Block | None) -> list[Block | None] | None:
        """The layer's input, q, k, v and attention's output in fewer bits, beside themselves; None without rounding."""
        if self._stored_dtype is None:
            return None
        attention = kept.attention
        return [self._rounded(one) for one in (x, attention.q, attention.k, attention.v, attention.out)]

    def _rounded(self, block: Block | None) -> Block | None:
        """Float8 has an fp32 scale a token, and takes the absolute values and the scaled ones on the way."""
        if block is None or self._stored_dtype is None:
            return None
        numbers = block.nbytes // self.sizes.itemsize
        scales = 0
        if self._stored_dtype == FLOAT8:
            self.ledger.touch(TEMPORARY, block.nbytes)
            scales = WIDE * self.sizes.tokens
        return self.ledger.take(ACTIVATIONS, numbers * self._stored_dtype.itemsize + scales)

    def _restored(self, block: Block | None, features: int, rows: int) -> Block | None:
        """The numbers themselves again, made when they are asked for."""
        if block is None or self._stored_dtype is None:
            return block
        whole = self.ledger.take(ACTIVATIONS, self.sizes.numbers(rows, features))
        self.ledger.drop(block)
        return whole

    def _attention_forward(
        self, layer: LayerShape, policy: Policy, needs: Needs, kept: LayerKept, *, saved: bool, last: bool = False
    ) -> None:
        """x + attention(norm(x)); `last`: the second run of a region that ends here."""
        ledger = self.ledger
        keeps = policy.keeps_inputs and layer.qkv.rank + len(layer.qkv.trained_rows) > 0
        product, kept.qkv = self._linear.forward(
            layer.qkv, _source(layer), column=True, saved=saved and needs.qkv, keeps_input=keeps
        )
        found = self._attention.split(layer, product)
        self._attention.attend(layer, found)
        branch, kept.out = self._linear.forward(
            layer.out, "given", column=False, saved=saved and needs.middle, without_rows=last and not layer.output_norms
        )
        if saved and needs.qkv:
            kept.attention = found
        elif saved and needs.middle:
            # the output projection keeps its input, whatever that was made from
            ledger.drop(*(block for block in found.blocks() if block is not found.out))
            kept.attention = AttentionKept(out=found.out)
        else:
            ledger.drop(*found.blocks())
        normed, kept.out_norm = self._output_norm(layer, branch, saved=saved and needs.middle)
        if not last:
            kept.middle = self.stream()
        ledger.drop(normed)

    def _mlp_forward(
        self, layer: LayerShape, policy: Policy, needs: Needs, kept: LayerKept, *, saved: bool, last: bool = False
    ) -> Block | None:
        """x + mlp(norm(x)); `last` as above."""
        ledger = self.ledger
        keeps_up = policy.keeps_inputs and layer.gate_up.rank + len(layer.gate_up.trained_rows) > 0
        keeps_down = policy.keeps_inputs and layer.down.rank + len(layer.down.trained_rows) > 0
        activated, kept.gate_up = self._linear.forward(
            layer.gate_up, _source(layer), column=True, saved=saved and needs.gate_up, keeps_input=keeps_up
        )
        branch, kept.down = self._linear.forward(
            layer.down, "swiglu", column=False, saved=saved and needs.output, keeps_input=keeps_down,
            without_rows=last and not layer.output_norms,
        )  # fmt: skip
        if saved and needs.output:
            kept.activated = activated
        else:
            ledger.drop(activated)
        normed, kept.down_norm = self._output_norm(layer, branch, saved=saved and needs.output)
        output = None if last else self.stream()
        ledger.drop(normed)
        return output

    def _output_norm(
        self, layer: LayerShape, branch: Block, *, saved: bool
    ) -> tuple[Block, tuple[Block | None, Block | None]]:
        """What is added to the residual stream; a norm makes a tensor of its own of it and keeps what it was."""
        if not layer.output_norms:
            return branch, (None, None)
        normed = self.stream(TEMPORARY)
        statistics = self._linear.make("norm", self.sizes.local, self.hidden)
        if saved:
            return normed, (branch, statistics)
        self.ledger.drop(branch, statistics)
        return normed, (None, None)

    def _output_norm_backward(
        self, layer: LayerShape, kept: tuple[Block | None, Block | None], dy: Block
    ) -> Block | None:
        """The gradient of the branch, beside that of the residual stream; None where they are one tensor."""
        if not layer.output_norms:
            return None
        gradient = self._linear.source_gradient(
            "norm", dy, self.sizes.local, self.hidden, trains_norm=layer.trains_output_norms
        )
        self.ledger.drop(*kept)
        return gradient

    # Backward.

    def backward(
        self, layer: LayerShape, level: Level, needs: Needs, kept: LayerKept, x: Block | None, dy: Block
    ) -> Block | None:
        """The gradient of the layer's input, None where nobody needs it. Frees `x`, `dy` and what was kept."""
        policy, tokens = POLICIES[level], self.sizes.tokens
        if policy.again == ("attention", "mlp"):
            x = self._restored(x, self.hidden, self.sizes.local)
            self._attention_forward(layer, policy, needs, kept, saved=True)
            self._mlp_forward(layer, policy, needs, kept, saved=True, last=True)
        else:
            kept.activated = self._restored(kept.activated, layer.gate_up.outputs, tokens)
        middle = self._mlp_backward(layer, needs, kept, dy, restores=not policy.again or len(policy.again) == 1)
        if middle is None:
            self.ledger.drop(x)
            return None
        if policy.again == ("attention",):
            x = self._restored(x, self.hidden, self.sizes.local)
            self._attention_forward(layer, policy, needs, kept, saved=True, last=True)
        return self._attention_backward(layer, needs, kept, x, middle, restores=not policy.again)

    def _summed(self, residual: Block, branch: Block | None) -> Block:
        """Gradients of both ways into one tensor, which is a third one."""
        if branch is None:
            return residual
        both = self.stream(TEMPORARY)
        self.ledger.drop(residual, branch)
        return both

    def _mlp_backward(
        self, layer: LayerShape, needs: Needs, kept: LayerKept, dy: Block, *, restores: bool
    ) -> Block | None:
        ledger = self.ledger
        if not needs.output:
            ledger.drop(dy)
            return None
        own = self._output_norm_backward(layer, kept.down_norm, dy)
        activated = self._linear.backward(layer.down, "swiglu", kept.down, column=False, needs_gradient=needs.gate_up)
        ledger.drop(kept.activated, own)
        branch = None
        if activated is not None:
            if restores:
                kept.middle = self._restored(kept.middle, self.hidden, self.sizes.local)
            branch = self._linear.backward(
                layer.gate_up, _source(layer), kept.gate_up, column=True, needs_gradient=needs.middle,
                trains_norm=layer.trains_post_norm,
            )  # fmt: skip
            ledger.drop(activated, kept.middle)
        if not needs.middle:
            ledger.drop(dy)
            return None
        return self._summed(dy, branch)

    def _attention_backward(
        self, layer: LayerShape, needs: Needs, kept: LayerKept, x: Block | None, dy: Block, *, restores: bool
    ) -> Block | None:
        ledger, attention, tokens = self.ledger, kept.attention, self.sizes.tokens
        if restores:
            attention.out = self._restored(attention.out, layer.width, tokens)
        own = self._output_norm_backward(layer, kept.out_norm, dy)
        dout = self._linear.backward(layer.out, "given", kept.out, column=False, needs_gradient=needs.qkv)
        ledger.drop(own)
        if not needs.x:
            ledger.drop(dy)  # nothing before it wants the other way's gradient
        branch = None
        if dout is not None:
            if restores:
                attention.q = self._restored(attention.q, layer.width, tokens)
                attention.k = self._restored(attention.k, layer.kv_width, tokens)
                attention.v = self._restored(attention.v, layer.kv_width, tokens)
            product = self._attention.backward(layer, kept.attention, dout)
            if restores:
                x = self._restored(x, self.hidden, self.sizes.local)
            branch = self._linear.backward(
                layer.qkv, _source(layer), kept.qkv, column=True, needs_gradient=needs.x,
                trains_norm=layer.trains_input_norm,
            )  # fmt: skip
            ledger.drop(product)
        else:
            ledger.drop(*kept.attention.blocks())
        ledger.drop(x)
        return self._summed(dy, branch) if needs.x else None
