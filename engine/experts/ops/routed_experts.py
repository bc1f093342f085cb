"""The experts of a mixture: y_t = sum over i of w_ti down_e(glu(gate_e(x_t), up_e(x_t))), e = e_ti.

Both linears of all experts here are one grouped product each way, with their adapters beside the weights: an expert's
storage is [W | B] and its rows are [x | H], H = s drop(x) A^T (see ops.products, "folded"), or W alone, where B is of
all experts or the base of several models (see ops.grouped_adapters).

Where experts' inner features are split over tensor ranks, y is this rank's part of a sum, and so are the gradients of
x and of the weights w, of gate's and up's A and of down's B. Where experts are divided over ranks, rows travel to them
and outputs back (ops.expert_exchange), and in backward their gradients.

Backward needs no output row of an expert: with G = dy[t] [W | B] of down, not yet weighted, the gradient of w is
<G, [a | H]>, and a's is w G. Where down has a bias b, <dy[t], b> is added. Of tensor ranks whose outputs are summed one
adds b, and has its gradient.

x is kept once a token, or once a row where rows have travelled, and [gate | up] and H of the rows; the rest is
recomputed. A mask is a function of step, site, feature, and of the token and its expert together.

Legend: T tokens, k experts of a token, N = T k rows sorted by expert, E experts, I and O features of a linear's input
and output, R rows of the stacked A. Where rows travel, N are this rank's slots in the arguments and those that have
arrived between the exchanges.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.experts.kernels import GroupedKernels
from engine.experts.ops.encoded_experts import EncodedExperts
from engine.experts.ops.expert_exchange import Arrival, Exchange
from engine.experts.ops.grouped_adapters import Blocks, ExpertAdapters, ExpertRows, GroupedLowRank, SpanRows, row_dots
from engine.experts.ops.grouped_products import (
    RowGroups,
    add_grouped_gradients,
    add_grouped_rows,
    add_grouped_sums,
    add_outer_products,
    grouped_product,
)
from engine.experts.ops.routing import Slots
from engine.kernels.philox import dropout_scale
from engine.kernels.records import GroupedUpdate
from engine.ops.activations import SwiGLUInput
from engine.ops.attention.token_context import TokenContext
from engine.ops.inputs import LinearInput
from engine.ops.kernels import Kernels

SWIGLU = SwiGLUInput()
"""What most families make of gate and up."""


class FusedGradient(NamedTuple):
    """What goes back through the adapters of one linear.

    Args:
        dh_NR: dH, times s.
        mask: of the linear's input; None where nothing is dropped.
        keep_scale: what is kept is multiplied by.
    """

    dh_NR: Tensor
    mask: Tensor | None
    keep_scale: float


class _Picked(NamedTuple):
    """Rows [N, F], or rows of a matrix by their numbers."""

    x: Tensor
    index_N: Tensor | None = None

    def rows(self) -> Tensor:
        return self.x if self.index_N is None else self.x.index_select(0, self.index_N)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedOperands:
    """One linear of all experts here.

    Args:
        extended_EOI: [E, O, I + R], each expert's weight with the columns of its adapters' B beside it; without these
            where experts share B, and on the meta device where weights are encoded.
        in_features: I.
        weight_blocks: destinations of the gradients of weights that train.
        low_rank: the adapters, or None.
        kernels: the backend.
        name: of its first logical linear, without the expert.
        bias_EO: each expert's bias, or None.
        bias_blocks: destinations of the gradients of biases that train.
        adds_bias: whether this rank does; always where outputs are no parts of a sum.
        encoded: the weights as they are stored, where they are not in `extended_EOI`.
        grouped: compiled kernels of one launch for all experts; None where torch's product computes them.
    """

    extended_EOI: Tensor
    in_features: int
    weight_blocks: Blocks
    low_rank: ExpertAdapters | None
    kernels: Kernels
    name: str = ""
    bias_EO: Tensor | None = None
    bias_blocks: Blocks = ()
    adds_bias: bool = True
    encoded: EncodedExperts | None = None
    grouped: GroupedKernels | None = None

    def in_context(self, context: TokenContext) -> GroupedOperands:
        """Returns these, or without the adapters where `context` says so or the weights have them in their codes."""
        in_codes = self.encoded is not None and self.encoded.has_adapters
        assert context.adapters or not in_codes, "the experts without adapters are not here"
        if self.low_rank is None or (context.adapters and not in_codes):
            return self
        encoded = None if self.encoded is None else self.encoded.bare()
        return replace(self, extended_EOI=self.extended_EOI[..., : self.in_features], low_rank=None, encoded=encoded)

    @property
    def drops(self) -> bool:
        """Whether adapters have dropout."""
        return self.low_rank is not None and self.low_rank.drops

    def fuses(self, groups: RowGroups) -> bool:
        """Returns whether compiled kernels compute the products, which read rows where they lie."""
        return self.grouped is not None and groups.on_host is None

    @property
    def _one_low_rank(self) -> GroupedLowRank | None:
        """The adapters, as compiled kernels take them: the same for all rows."""
        assert self.low_rank is None or isinstance(self.low_rank, GroupedLowRank)
        return self.low_rank

    @property
    def _merges(self) -> bool:
        """Whether the weights have the adapters in them."""
        return self._one_low_rank is not None and self._one_low_rank.is_merged

    def project(self, x_NI: Tensor, rows: ExpertRows, index_N: Tensor | None = None) -> Tensor | None:
        """Returns H [N, R], which is kept; None without adapters.

        Args:
            index_N: int64, the row of x of each row, where products are fused and rows are not in order.
        """
        if self.low_rank is None:
            return None
        if self.grouped is not None and self.fuses(rows.groups) and self._one_low_rank is not None:
            return self._fused_project(self.grouped, self._one_low_rank, x_NI, rows, index_N)
        return self.low_rank.project(x_NI, rows, self.kernels)

    def forward(self, x_NI: Tensor, h: Tensor | None, rows: ExpertRows, index_N: Tensor | None = None) -> Tensor:
        """Returns y [N, O], of x and H; see `project`."""
        groups, low_rank = rows.groups, self.low_rank
        if self.grouped is not None and self.fuses(groups):
            y = self._few_rows_product(x_NI, h, groups, index_N)
            if y is None:
                w_EOI, b_EOR = self._factors()
                update = None
                if h is not None and b_EOR is not None and not self._merges:
                    update = GroupedUpdate(h_NR=h, factors_ERM=b_EOR.mT)
                y = self.grouped.product(x_NI, w_EOI.mT, groups.ends, update=update, index_N=index_N)
            if self.bias_EO is not None and self.adds_bias:
                add_grouped_rows(y, self.bias_EO, groups)
            return y
        if low_rank is not None and h is not None and low_rank.lies_beside:
            x_NI = torch.cat([x_NI, h], dim=1)
        y = self._product(x_NI, groups, transposed=True)
        if low_rank is not None and h is not None and not low_rank.lies_beside:
            low_rank.expand(y, h, rows)
        if self.bias_EO is not None and self.adds_bias:
            add_grouped_rows(y, self.bias_EO, groups)
        return y

    def bias_dots(self, dy_NO: Tensor, rows: ExpertRows) -> Tensor | None:
        """Returns fp32 [N], the products of rows of dy with their experts' biases; None where none is added."""
        if self.bias_EO is None or not self.adds_bias:
            return None
        own_NO = self.bias_EO.index_select(0, rows.groups.experts_N(dy_NO.shape[0]))
        return (dy_NO.to(torch.float32) * own_NO).sum(dim=1)

    def gradient(self, dy_NO: Tensor, rows: ExpertRows) -> tuple[Tensor, Tensor | None]:
        """Returns dx = dy W, without what the adapters add to it, and dH / s = dy B."""
        both = self._product(dy_NO, rows.groups, transposed=False)
        if self.low_rank is None:
            return both, None
        if not self.low_rank.lies_beside:
            return both, self.low_rank.back_through_b(dy_NO, rows)
        return both[:, : self.in_features], both[:, self.in_features :]

    def _few_rows_product(
        self, x_NI: Tensor, h: Tensor | None, groups: RowGroups, index_N: Tensor | None
    ) -> Tensor | None:
        """Returns y of few rows, from the codes of the experts that have some; None where weights are decoded."""
        if self.encoded is None or self._merges:
            return None
        b_EOR = self._b_factors(self.encoded.b_EOR)
        factors = None if h is None or b_EOR is None else (h, b_EOR)
        return self.encoded.few_rows_product(x_NI, groups.ends, index_N, factors)

    def _factors(self) -> tuple[Tensor, Tensor | None]:
        """Returns each expert's W [E, O, I], decoded where it is stored encoded, and B."""
        width = self.extended_EOI.shape[2]
        both_EOI = self.extended_EOI if self.encoded is None else self.encoded.every(width)
        return both_EOI[..., : self.in_features], self._b_factors(both_EOI[..., self.in_features :])

    def _b_factors(self, beside_EOR: Tensor | None) -> Tensor | None:
        """Returns each expert's B [E, O, R], of one that experts share no copies; None without adapters.

        Args:
            beside_EOR: those that lie beside the weights.
        """
        low_rank = self._one_low_rank
        if low_rank is None:
            return None
        if low_rank.b_OR is not None:
            return low_rank.b_OR.expand(self.extended_EOI.shape[0], -1, -1)
        return beside_EOR if low_rank.b_EOR is None else low_rank.b_EOR

    def _fused_mask(self, rows: ExpertRows) -> tuple[Tensor | None, float]:
        """Returns the mask of these rows' inputs in the backend's form, and what is kept is multiplied by."""
        key = None if self._one_low_rank is None else self._one_low_rank.key(rows)
        return (None, 1.0) if key is None else (self.kernels.draw_mask(key), dropout_scale(key.probability))

    def _fused_project(
        self, grouped: GroupedKernels, low_rank: GroupedLowRank, x_NI: Tensor, rows: ExpertRows, index_N: Tensor | None
    ) -> Tensor:
        mask, keep_scale = self._fused_mask(rows)
        own = 1.0 if low_rank.scales_ER is not None else low_rank.scale
        return grouped.project(
            x_NI,
            low_rank.every_a(self.extended_EOI.shape[0]).mT,
            rows.groups.ends,
            index_N=index_N,
            mask=mask,
            scale=own * keep_scale,
            scales_ER=low_rank.scales_ER,
        )

    def fused_gradient(
        self, dy_NO: Tensor, rows: ExpertRows, index_N: Tensor | None, *, wants_dx: bool
    ) -> tuple[Tensor | None, FusedGradient | None]:
        """Returns dx = dy W + drop'(dH A), where it is wanted, and dH = s dy B with the mask of the input.

        Weights that have the adapters in them make all of dx.
        """
        grouped, low_rank, ends = self.grouped, self._one_low_rank, rows.groups.ends
        assert grouped is not None
        w_EOI, b_EOR = self._factors()
        through, update = None, None
        if low_rank is not None and b_EOR is not None:
            scale = 1.0 if low_rank.scales_ER is not None else low_rank.scale
            dh = grouped.project(dy_NO, b_EOR, ends, index_N=index_N, scale=scale, scales_ER=low_rank.scales_ER)
            through = FusedGradient(dh, *self._fused_mask(rows))
            if not low_rank.is_merged:
                update = GroupedUpdate(
                    h_NR=dh, factors_ERM=low_rank.every_a(w_EOI.shape[0]), mask=through.mask, scale=through.keep_scale
                )
        dx = grouped.product(dy_NO, w_EOI, ends, update=update, index_N=index_N) if wants_dx else None
        return dx, through

    def add_adapter_gradients(
        self, dy: _Picked, x: _Picked, h_NR: Tensor | None, through: FusedGradient | None, rows: ExpertRows
    ) -> None:
        """Adds dA and dB to their sinks.

        Args:
            dy, x: the gradient of the output, and the input.
            h_NR, through: H and what `fused_gradient` returned, weighted where dy is not.
        """
        grouped, low_rank, ends = self.grouped, self._one_low_rank, rows.groups.ends
        assert grouped is not None
        if low_rank is None or h_NR is None or through is None:
            return
        if any(low_rank.a_blocks):
            da = grouped.outer(
                through.dh_NR, x.x, ends, index_N=x.index_N, mask=through.mask, scale=through.keep_scale,
                ranks_first=True,
            )  # fmt: skip
            add_outer_products(da, low_rank.a_blocks, shared=low_rank.shares_a)
        if any(low_rank.b_blocks):
            db = grouped.outer(h_NR, dy.x, ends, index_N=dy.index_N, ranks_first=False)
            add_outer_products(db, low_rank.b_blocks, shared=low_rank.b_OR is not None)

    def _product(self, x_NK: Tensor, groups: RowGroups, *, transposed: bool) -> Tensor:
        """Returns each row times its expert's [W | B], or times its transpose."""
        weights_EOI, encoded, width = self.extended_EOI, self.encoded, self.extended_EOI.shape[2]
        if encoded is not None and groups.on_host is not None:
            y = x_NK.new_empty(x_NK.shape[0], weights_EOI.shape[1] if transposed else width)
            for expert, rows in groups.slices():
                if transposed:
                    y[rows] = encoded.product(expert, x_NK[rows], self.kernels.product)
                else:
                    y[rows] = self.kernels.product(x_NK[rows], encoded.one(expert, width))
            return y
        if encoded is not None:
            weights_EOI = encoded.every(width)
        return grouped_product(x_NK, weights_EOI.mT if transposed else weights_EOI, groups, self.kernels.product)

    def add_weight_gradients(self, dy_NO: Tensor, x_NI: Tensor, h_NR: Tensor | None, rows: ExpertRows) -> None:
        """Adds dW and dB to their sinks, and weights x and H before where the caller has not."""
        add_grouped_gradients(dy_NO, x_NI, rows.groups, self.weight_blocks)
        if self.low_rank is not None and h_NR is not None:
            self.low_rank.add_b_gradients(dy_NO, h_NR, rows)

    def add_bias_gradients(self, dy_NO: Tensor, rows: ExpertRows) -> None:
        """Adds the biases' gradients to their sinks."""
        add_grouped_sums(dy_NO, rows.groups, self.bias_blocks, counts=self.adds_bias)

    def through_adapters(self, dx_NI: Tensor | None, dh_NR: Tensor | None, x_NI: Tensor, rows: ExpertRows) -> None:
        """Adds dA to its sinks, and drop'(dH A) to dx, in place where that is wanted.

        Args:
            dh_NR: dH / s; overwritten.
        """
        if self.low_rank is not None and dh_NR is not None:
            self.low_rank.through_a(dx_NI, dh_NR, x_NI, rows, self.kernels)


class RoutedPass:
    """The experts of a mixture on the tokens of one micro-batch, in three steps: `dispatch`, `compute`, `combine`.

    Where experts are divided over ranks, rows travel after the first and after the second, and in backward, which comes
    in the opposite order, their gradients do. What the caller computes between two steps hides them in both directions,
    since autograd goes back through what is ready latest first.

    In autograd's graph the steps hang together by tensors without elements. What passes from one to the next is here:
    the rows of a tensor that is on its way are not yet there, and their number is not that of the gradient's.

    Args:
        slots: of the router.
        gate_up, down: this rank's part of the experts.
        context: coordinates of the tokens.
        leaves: every tensor in the operands that trains.
        exchange: with the ranks that have the other experts.
        gated: makes a from [gate | up].
        leaves_output: the output is not read, because a recomputed region ends with it and this is its second run.
        spans: see `ExpertRows`.
    """

    def __init__(
        self,
        slots: Slots,
        gate_up: GroupedOperands,
        down: GroupedOperands,
        context: TokenContext,
        leaves: tuple[Tensor, ...],
        exchange: Exchange,
        *,
        gated: LinearInput = SWIGLU,
        leaves_output: bool = False,
        spans: tuple[SpanRows, ...] = (),
    ) -> None:
        self.gate_up, self.down = gate_up.in_context(context), down.in_context(context)
        self.slots, self.exchange, self.gated, self.leaves_output = slots, exchange, gated, leaves_output
        self._context, self._leaves, self._spans = context, leaves, spans
        self.fuses = self.gate_up.fuses(exchange.groups)
        self.index = slots.tokens_N if self.fuses and exchange.stays else None
        """The token of each row, where products pick rows themselves."""
        self.weights_TK: Tensor | None = None
        self.wants_dx = False
        """Whether the tokens have a gradient; known when their rows leave."""
        # on the way to the experts: rows (this rank's tokens, where rows stay), their dropout coordinates, and in
        # backward the gradients of outputs and the weights
        self.x: Arrival | None = None
        self.coordinates: Arrival | None = None
        self.dy: Arrival | None = None
        self.w: Arrival | None = None
        # on the way back: outputs, and in backward the gradients of rows and of the weights
        self.y: Arrival | None = None
        self.dx: Arrival | None = None
        self.d_weights: Arrival | None = None

    def dispatch(self, x_TI: Tensor, weights_TK: Tensor) -> Tensor:
        """Starts the rows of tokens on their way to their experts.

        Args:
            x_TI: all tokens.
            weights_TK: of the router.

        Returns:
            What `compute` is called with, and that returns what `combine` is called with.
        """
        if self._context.training and (self.gate_up.drops or self.down.drops):
            self.coordinates = self.exchange.out(self.slots.coordinates(self._context.token_index))
        self.weights_TK = weights_TK.detach()
        return _Dispatch.apply(x_TI, weights_TK, self)

    def compute(self, link: Tensor) -> Tensor:
        """Waits for the rows, computes the experts, and starts the outputs on their way back."""
        coordinates = None if self.coordinates is None else self.coordinates.take()
        rows = ExpertRows(
            groups=self.exchange.groups, coordinates_N=coordinates, context=self._context, spans=self._spans
        )
        return _Compute.apply(link, self, rows, *self._leaves)

    def combine(self, link: Tensor) -> Tensor:
        """Waits for the outputs. Returns [T, I], this rank's part of the sum over tensor ranks."""
        return _Combine.apply(link, self)


def _taken(arrival: Arrival | None) -> Tensor:
    assert arrival is not None
    return arrival.take()


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weights_TK: Tensor, routed: RoutedPass) -> Tensor:
        ctx.routed, ctx.dtype = routed, weights_TK.dtype
        routed.wants_dx = ctx.needs_input_grad[0]
        x = x_TI.detach()
        routed.x = Arrival(x) if routed.exchange.stays else routed.exchange.out(routed.slots.gather(x))
        return x_TI.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        routed: RoutedPass = ctx.routed
        rows_TK, kernels = routed.slots.rows_TK, routed.down.kernels
        d_weights = _taken(routed.d_weights).index_select(0, rows_TK.flatten()).view_as(rows_TK)
        d_input = kernels.combine_rows(_taken(routed.dx), rows_TK) if ctx.needs_input_grad[0] else None
        return d_input, d_weights.to(ctx.dtype), None


class _Compute(torch.autograd.Function):
    """The leaves (trainable tensors) are passed only so that autograd knows the output depends on them."""

    @staticmethod
    def forward(ctx: Any, link: Tensor, routed: RoutedPass, rows: ExpertRows, *leaves: Tensor) -> Tensor:
        gate_up, down, exchange = routed.gate_up, routed.down, routed.exchange
        kept_x, index = _taken(routed.x), routed.index
        x = kept_x if index is not None or not exchange.stays else routed.slots.gather(kept_x)
        h = gate_up.project(x, rows, index)
        both = gate_up.forward(x, h, rows, index)
        a, _ = routed.gated.make(both, None, gate_up.kernels)
        h_down = down.project(a, rows)
        if not routed.leaves_output:
            routed.y = exchange.back(down.forward(a, h_down, rows))
        ctx.save_for_backward(kept_x, both, h, h_down)
        ctx.routed, ctx.rows, ctx.num_leaves = routed, rows, len(leaves)
        return link.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        kept_x, both, h, h_down = ctx.saved_tensors
        routed, rows = ctx.routed, ctx.rows
        if routed.fuses:
            _fused_backward(routed, rows, kept_x, both, h, h_down, weights_train=ctx.needs_input_grad[0])
            return (both.new_empty(0), None, None, *([None] * ctx.num_leaves))
        gate_up, down, gated = routed.gate_up, routed.down, routed.gated
        slots, exchange = routed.slots, routed.exchange
        a, _ = gated.make(both, None, gate_up.kernels)
        w_N1, dy = _taken(routed.w)[:, None], _taken(routed.dy)
        if exchange.stays:
            dy = slots.gather(dy)
        da, dh_down = down.gradient(dy, rows)
        dots, bias_dots = row_dots(da, a), down.bias_dots(dy, rows)
        if h_down is not None and down.low_rank is not None:
            dots = dots + down.low_rank.dots(dh_down, h_down, rows)
        if ctx.needs_input_grad[0]:
            routed.d_weights = exchange.back(dots if bias_dots is None else dots + bias_dots)
        w = w_N1.to(dy.dtype)
        weighted = a * w if any(down.weight_blocks) else a  # not read where no weight trains
        down.add_weight_gradients(dy, weighted, None if h_down is None else h_down * w, rows)
        if down.bias_blocks:
            down.add_bias_gradients(dy * w, rows)
        for given in (da, dh_down):
            if given is not None:
                given.mul_(w)
        down.through_adapters(da, dh_down, a, rows)
        d_both = gated.gradient(da.contiguous(), both, None, None, gate_up.kernels)
        del given, da, dh_down, a, dy
        x = slots.gather(kept_x) if exchange.stays else kept_x
        dx, dh = gate_up.gradient(d_both, rows)
        gate_up.through_adapters(dx if routed.wants_dx else None, dh, x, rows)
        if routed.wants_dx:
            routed.dx = exchange.back(dx)
        gate_up.add_weight_gradients(d_both, x, h, rows)  # while dx travels
        gate_up.add_bias_gradients(d_both, rows)
        return (d_both.new_empty(0), None, None, *([None] * ctx.num_leaves))


def _fused_backward(
    routed: RoutedPass,
    rows: ExpertRows,
    kept_x: Tensor,
    both: Tensor,
    h: Tensor | None,
    h_down: Tensor | None,
    *,
    weights_train: bool,
) -> None:
    """Computes what `_Compute.backward` does, by the kernels of `engine.experts.kernels`.

    Not yet weighted, the gradient of a is g = dy W + drop'(s dy B A), of which <g, a> = <dy, y - b>: what dropout and
    A make of a in it is H.
    """
    gate_up, down, gated, exchange = routed.gate_up, routed.down, routed.gated, routed.exchange
    assert down.grouped is not None
    a, _ = gated.make(both, None, gate_up.kernels)
    w_N, index = _taken(routed.w), routed.index
    dy = _Picked(_taken(routed.dy), index)
    da, through = down.fused_gradient(dy.x, rows, dy.index_N, wants_dx=True)
    assert da is not None
    dots = down.grouped.weigh(da, a, w_N)
    trains = any(down.weight_blocks) or bool(down.bias_blocks)
    dy_rows = dy.rows() if trains or (down.bias_EO is not None and down.adds_bias) else dy.x
    if weights_train:
        bias_dots = down.bias_dots(dy_rows, rows)
        routed.d_weights = exchange.back(dots if bias_dots is None else dots + bias_dots)
    w_N1 = w_N[:, None].to(dy.x.dtype)
    weighted = a * w_N1 if any(down.weight_blocks) else a  # not read where no weight trains
    if down.bias_blocks:
        down.add_bias_gradients(dy_rows * w_N1, rows)
    add_grouped_gradients(dy_rows, weighted, rows.groups, down.weight_blocks)
    if through is not None and h_down is not None:
        through = through._replace(dh_NR=through.dh_NR * w_N1)
        down.add_adapter_gradients(dy, _Picked(a), h_down * w_N1, through, rows)
    d_both = gated.gradient(da, both, None, None, gate_up.kernels)
    del da, dy, dy_rows, a, weighted
    dx, through = gate_up.fused_gradient(d_both, rows, None, wants_dx=routed.wants_dx)
    if dx is not None:
        routed.dx = exchange.back(dx)
    x = _Picked(kept_x, index)
    if any(gate_up.weight_blocks):  # while dx travels
        add_grouped_gradients(d_both, x.rows(), rows.groups, gate_up.weight_blocks)
    gate_up.add_adapter_gradients(_Picked(d_both), x, h, through, rows)
    gate_up.add_bias_gradients(d_both, rows)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: Tensor, routed: RoutedPass) -> Tensor:
        ctx.routed = routed
        return routed.down.kernels.combine_rows(_taken(routed.y), routed.slots.rows_TK, routed.weights_TK)

    @staticmethod
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Any, ...]:
        routed: RoutedPass = ctx.routed
        slots, exchange = routed.slots, routed.exchange
        assert routed.weights_TK is not None
        routed.w = exchange.out(routed.weights_TK.flatten().index_select(0, slots.order_N))
        routed.dy = Arrival(dy_TO) if exchange.stays else exchange.out(slots.gather(dy_TO))
        return dy_TO.new_empty(0), None
