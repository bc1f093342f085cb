"""The experts of a mixture: y_t = sum over i of w_ti down_e(swiglu(gate_e(x_t), up_e(x_t))), e = e_ti.

Both linears of all experts here are one grouped product each way, with their adapters beside the weights: an expert's
storage is [W | B] and its rows are [x | H], H = s drop(x) A^T (see ops.products, "folded").

Nothing communicates. Where experts' inner features are split over tensor ranks, y is this rank's part of a sum, and so
are the gradients of x and of the weights w, of gate's and up's A and of down's B.

Backward needs no output row of an expert: with G = dy[t] [W | B] of down, not yet weighted, the gradient of w is
<G, [a | H]>, and a's is w G.

x is kept, and [gate | up] and H of the rows; the rest is recomputed. A mask is a function of step, site,
feature, and of the token and its expert together.

Legend: T tokens, k experts of a token, N = T k rows sorted by expert, E experts, I and O features of a linear's input
and output, R rows of the stacked A.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.kernels.philox import dropout_mask
from engine.kernels.records import AdapterPlace
from engine.ops.attention.token_context import TokenContext
from engine.ops.dropout import DropoutSite
from engine.ops.grouped_products import GradientBlock, add_grouped_gradients, grouped_product
from engine.ops.inputs import SwiGLUInput
from engine.ops.kernels import Kernels, scale_projection
from engine.ops.routing import Slots

Blocks = tuple[tuple[GradientBlock, ...], ...]
"""What is trained of each expert."""
_GATED = SwiGLUInput()


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedLowRank:
    """The adapters of one linear of all experts.

    Args:
        a_ERI: stacked A of each expert, padded to as many rows as the storage has columns for B.
        places: of the sections' adapters, the same in every expert; one that an expert lacks is zero there.
        a_blocks, b_blocks: destinations of the gradients of A and of B.
        dropout: of the input, or None.
    """

    a_ERI: Tensor
    places: tuple[AdapterPlace, ...]
    a_blocks: Blocks
    b_blocks: Blocks
    dropout: DropoutSite | None


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedOperands:
    """One linear of all experts here.

    Args:
        extended_EOI: [E, O, I + R], each expert's weight with the columns of its adapters' B beside it.
        in_features: I.
        weight_blocks: destinations of the gradients of weights that train.
        low_rank: the adapters, or None.
        kernels: the backend.
    """

    extended_EOI: Tensor
    in_features: int
    weight_blocks: Blocks
    low_rank: GroupedLowRank | None
    kernels: Kernels

    def in_context(self, context: TokenContext) -> GroupedOperands:
        """Returns these, or without the adapters where `context` says so."""
        if context.adapters or self.low_rank is None:
            return self
        return replace(self, extended_EOI=self.extended_EOI[..., : self.in_features], low_rank=None)

    def split(self, both_NI: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the parts of [x | H], or of its gradient; views."""
        if self.low_rank is None:
            return both_NI, None
        return both_NI[:, : self.in_features], both_NI[:, self.in_features :]

    def dropped(self, x_NI: Tensor, rows: _Rows, *, gradient: bool = False) -> Tensor:
        """Returns drop(x): the mask's elements of x times the scale. In place for a gradient, which is owned."""
        assert self.low_rank is not None
        site = self.low_rank.dropout
        if site is None or not rows.context.training:
            return x_NI
        mask = dropout_mask(site.key(rows.coordinates_N, self.in_features, rows.context.step))
        return x_NI.mul_(mask).mul_(site.scale) if gradient else (x_NI * mask).mul_(site.scale)

    def forward(self, x_NI: Tensor, rows: _Rows) -> tuple[Tensor, Tensor | None]:
        """Returns y [N, O], and H [N, R], which is kept."""
        groups, low_rank, product = rows.slots.groups, self.low_rank, self.kernels.product
        if low_rank is None:
            return grouped_product(x_NI, self.extended_EOI.transpose(1, 2), groups, product), None
        h = grouped_product(self.dropped(x_NI, rows), low_rank.a_ERI.transpose(1, 2), groups, torch.mm)
        scale_projection(h, low_rank.places)
        both = torch.cat([x_NI, h], dim=1)
        return grouped_product(both, self.extended_EOI.transpose(1, 2), groups, product), h

    def gradient(self, dy_NO: Tensor, rows: _Rows) -> Tensor:
        """Returns dy [W | B] = [dx | dH / s], without what the adapters add to dx."""
        return grouped_product(dy_NO, self.extended_EOI, rows.slots.groups, self.kernels.product)

    def add_weight_gradients(self, dy_NO: Tensor, x_NI: Tensor, h_NR: Tensor | None, rows: _Rows) -> None:
        """Adds dW and dB to their sinks, and weights x and H before where the caller has not."""
        groups = rows.slots.groups
        add_grouped_gradients(dy_NO, x_NI, groups, self.weight_blocks)
        if self.low_rank is not None and h_NR is not None:
            add_grouped_gradients(dy_NO, h_NR, groups, self.low_rank.b_blocks)

    def through_adapters(self, dx_NI: Tensor | None, dh_NR: Tensor | None, x_NI: Tensor, rows: _Rows) -> None:
        """Adds dA to its sinks, and drop'(dH A) to dx, in place where that is wanted.

        Args:
            dh_NR: dH / s; overwritten.
        """
        low_rank, groups = self.low_rank, rows.slots.groups
        if low_rank is None or dh_NR is None:
            return
        dh = scale_projection(dh_NR.contiguous(), low_rank.places)
        add_grouped_gradients(dh, self.dropped(x_NI, rows), groups, low_rank.a_blocks)
        if dx_NI is not None:
            update = grouped_product(dh, low_rank.a_ERI, groups, torch.mm)
            dx_NI.add_(self.dropped(update, rows, gradient=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """The rows of one micro-batch.

    Args:
        slots: sorted by expert.
        num_experts: of the whole model, for the coordinates.
        context: of the tokens.
    """

    slots: Slots
    num_experts: int
    context: TokenContext

    @property
    def coordinates_N(self) -> Tensor:
        """The dropout coordinate of each row, different for each token and expert."""
        tokens = self.context.token_index.index_select(0, self.slots.tokens_N)
        return tokens * self.num_experts + self.slots.experts_N


class _RoutedExperts(torch.autograd.Function):
    """The leaves (trainable tensors) are passed only so that autograd knows the output depends on them."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        weights_TK: Tensor,
        rows: _Rows,
        gate_up: GroupedOperands,
        down: GroupedOperands,
        *leaves: Tensor,
    ) -> Tensor:
        both, h = gate_up.forward(rows.slots.gather(x_TI), rows)
        a, _ = _GATED.make(both, None, gate_up.kernels)
        y, h_down = down.forward(a, rows)
        ctx.save_for_backward(x_TI, weights_TK, both, h, h_down)
        ctx.rows, ctx.gate_up, ctx.down, ctx.num_leaves = rows, gate_up, down, len(leaves)
        return rows.slots.combine(y, weights_TK)

    @staticmethod
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Any, ...]:
        x_TI, weights_TK, both, h, h_down = ctx.saved_tensors
        rows, gate_up, down = ctx.rows, ctx.gate_up, ctx.down
        slots = rows.slots
        w_N1 = weights_TK.flatten().index_select(0, slots.order_N)[:, None]
        dy = slots.gather(dy_TO)
        a, _ = _GATED.make(both, None, gate_up.kernels)
        given = down.gradient(dy, rows)
        d_weights = _dots(given, a, h_down).index_select(0, slots.rows_TK.flatten()).view_as(slots.rows_TK)
        w = w_N1.to(dy.dtype)
        down.add_weight_gradients(dy, a * w, None if h_down is None else h_down * w, rows)
        da, dh_down = down.split(given.mul_(w))
        down.through_adapters(da, dh_down, a, rows)
        d_both = _GATED.gradient(da.contiguous(), both, None, None, gate_up.kernels)
        del given, da, dh_down, a, dy
        x = slots.gather(x_TI)
        dx, dh = gate_up.split(gate_up.gradient(d_both, rows))
        gate_up.add_weight_gradients(d_both, x, h, rows)
        needs_dx = ctx.needs_input_grad[0]
        gate_up.through_adapters(dx if needs_dx else None, dh, x, rows)
        d_input = slots.combine(dx) if needs_dx else None
        return (d_input, d_weights.to(weights_TK.dtype), None, None, None, *([None] * ctx.num_leaves))


def _dots(given_NI: Tensor, a_NI: Tensor, h_NR: Tensor | None) -> Tensor:
    """Returns fp32 [N], the products of rows: with a, and with H beside it."""
    width = a_NI.shape[1]
    total = (given_NI[:, :width].to(torch.float32) * a_NI).sum(dim=1)
    return total if h_NR is None else total + (given_NI[:, width:].to(torch.float32) * h_NR).sum(dim=1)


def routed_experts(
    x_TI: Tensor,
    weights_TK: Tensor,
    slots: Slots,
    gate_up: GroupedOperands,
    down: GroupedOperands,
    context: TokenContext,
    leaves: tuple[Tensor, ...],
) -> Tensor:
    """Computes the experts of a mixture.

    Args:
        x_TI: all tokens.
        weights_TK, slots: of the router.
        gate_up, down: this rank's part of the experts.
        context: coordinates of the tokens.
        leaves: every tensor in the operands that trains.

    Returns:
        [T, I], this rank's part of the sum over tensor ranks.
    """
    rows = _Rows(slots=slots, num_experts=gate_up.extended_EOI.shape[0], context=context)
    gate_up, down = gate_up.in_context(context), down.in_context(context)
    return _RoutedExperts.apply(x_TI, weights_TK, rows, gate_up, down, *leaves)
