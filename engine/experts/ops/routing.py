"""The choice of each token's experts, and the tokens' rows sorted by it.

    logits = x W^T + b        scores = softmax(logits) or sigmoid(logits), in fp32        k largest, which are weights

What is compared may differ from the scores: a correction, which balanced the load in pretraining, is added to it alone,
and experts may be compared group by group (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). Of gpt-oss, the softmax is
over the k chosen logits alone.

Each pair of a token and one of its k experts is a slot: slot t k + i is token t's i-th choice. Rows of experts are the
slots, sorted by expert and then by token, so that no token is dropped and no expert's order depends on another's.
What the experts return is summed over a token's slots in the order of its choices: the result does not depend on where
experts are computed, nor on how many rows the others have.

Legend: T tokens, H features of a token, E experts, k experts of a token, N = T k slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from engine.experts.ops.grouped_products import RowGroups, row_groups
from engine.ops.gradients import GradientSink
from engine.ops.kernels import Product


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingRule:
    """How a family's router chooses.

    Args:
        num_experts, per_token: E and k.
        renormalises: the chosen experts' scores are divided by their sum.
        rounds: these weights are rounded to the dtype of the activations; otherwise they stay fp32.
        scores: softmax over all experts, sigmoid of each, or softmax over the chosen alone, which are then compared by
            their logits.
        num_groups, kept_groups: groups of neighbouring experts, and how many of them a token chooses from: those whose
            best experts together score highest.
        group_best: how many experts a group is compared by.
        factor: on the weights.
        has_bias: on the logits.
        has_correction: each expert has a number that is added to its score where experts are compared, and nowhere
            else.
        least: added to the sum that sigmoids are divided by, which may be 0 in fp32; probabilities' may not.
        smallest_sum: that sum is not taken to be smaller.
        correction_is_row: the corrections are a matrix of one row.
        wide: logits are computed in fp32, whatever the dtype of the activations.
        keeps_weight_wide: the weight, where it does not train, is fp32 too.
        input_factor: the router reads x times a vector of its own and this number; None where it reads x.
        scales_experts: the weights are multiplied by a number of each expert.
    """

    num_experts: int
    per_token: int
    renormalises: bool
    rounds: bool
    scores: Literal["softmax", "sigmoid", "softmax of chosen"] = "softmax"
    num_groups: int = 1
    kept_groups: int = 1
    group_best: int = 2
    factor: float = 1.0
    has_bias: bool = False
    has_correction: bool = False
    least: float = 1e-20
    smallest_sum: float = 0.0
    correction_is_row: bool = False
    wide: bool = False
    keeps_weight_wide: bool = False
    input_factor: float | None = None
    scales_experts: bool = False


class Slots(NamedTuple):
    """The slots sorted by expert.

    Args:
        order_N: int64, the slot of each row.
        rows_TK: int64, the row of each slot.
        groups: each expert's rows.
    """

    order_N: Tensor
    rows_TK: Tensor
    groups: RowGroups

    @property
    def tokens_N(self) -> Tensor:
        """The token of each row."""
        return self.order_N // self.rows_TK.shape[1]

    @property
    def experts_N(self) -> Tensor:
        """The expert of each row."""
        return self.groups.experts_N(self.order_N.shape[0])

    def coordinates(self, token_index_T: Tensor) -> Tensor:
        """Returns int64 [N], the dropout coordinate of each row, different for each token and expert."""
        num_experts = self.groups.ends.shape[0]
        return token_index_T.index_select(0, self.tokens_N) * num_experts + self.experts_N

    def gather(self, x_TF: Tensor) -> Tensor:
        """Returns [N, F]: each row's token."""
        return x_TF.index_select(0, self.tokens_N)


class _SinkLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        weight_EH: Tensor,
        sink: GradientSink | None,
        dtype: torch.dtype | None,
        product: Product,
    ) -> Tensor:
        ctx.save_for_backward(x_TH, weight_EH)
        ctx.sink, ctx.dtype, ctx.product = sink, dtype or x_TH.dtype, product
        return product(x_TH.to(ctx.dtype), weight_EH.to(ctx.dtype).t())

    @staticmethod
    def backward(ctx: Any, dy_TE: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        x_TH, weight_EH = ctx.saved_tensors
        if ctx.sink is not None:
            ctx.sink.add_product(dy_TE.t(), x_TH.to(ctx.dtype))
        dx = ctx.product(dy_TE, weight_EH.to(ctx.dtype)).to(x_TH.dtype) if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None


def sink_linear(
    x_TH: Tensor,
    weight_EH: Tensor,
    sink: GradientSink | None,
    dtype: torch.dtype | None = None,
    product: Product = torch.mm,
) -> Tensor:
    """Returns x W^T, [T, E], for a small weight that every rank holds whole; its gradient goes to `sink`.

    Args:
        dtype: of the product and of what it reads; None for that of x.
        product: of the backend.
    """
    return _SinkLinear.apply(x_TH, weight_EH, sink, dtype, product)


class _SinkBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TE: Tensor, bias_E: Tensor, sink: GradientSink | None) -> Tensor:
        ctx.sink = sink
        return x_TE + bias_E.to(x_TE.dtype)

    @staticmethod
    def backward(ctx: Any, dy_TE: Tensor) -> tuple[Tensor, None, None]:
        if ctx.sink is not None:
            ctx.sink.add(dy_TE.sum(dim=0, dtype=torch.float32))
        return dy_TE, None, None


def sink_bias(x_TE: Tensor, bias_E: Tensor, sink: GradientSink | None) -> Tensor:
    """Returns x + b, [T, E]; the bias's gradient goes to `sink`."""
    return _SinkBias.apply(x_TE, bias_E, sink)


class _SinkScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, scale_H: Tensor, sink: GradientSink | None, factor: float) -> Tensor:
        ctx.save_for_backward(x_TH, scale_H)
        ctx.sink, ctx.factor = sink, factor
        return (x_TH * scale_H).mul_(factor)

    @staticmethod
    def backward(ctx: Any, dy_TH: Tensor) -> tuple[Tensor, None, None, None]:
        x_TH, scale_H = ctx.saved_tensors
        if ctx.sink is not None:
            ctx.sink.add((dy_TH * x_TH).sum(dim=0, dtype=torch.float32).mul_(ctx.factor))
        return (dy_TH * scale_H).mul_(ctx.factor), None, None, None


def sink_scale(x_TH: Tensor, scale_H: Tensor, sink: GradientSink | None, factor: float = 1.0) -> Tensor:
    """Returns factor x s, [T, H], for a small vector that every rank holds whole; its gradient goes to `sink`."""
    return _SinkScale.apply(x_TH, scale_H, sink, factor)


class _SinkChosen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights_TK: Tensor, ids_TK: Tensor, scale_E: Tensor, sink: GradientSink | None) -> Tensor:
        ctx.save_for_backward(weights_TK, ids_TK, scale_E)
        ctx.sink = sink
        return weights_TK * scale_E[ids_TK]

    @staticmethod
    def backward(ctx: Any, dy_TK: Tensor) -> tuple[Tensor, None, None, None]:
        weights_TK, ids_TK, scale_E = ctx.saved_tensors
        if ctx.sink is not None:
            products = (dy_TK * weights_TK).to(torch.float32).flatten()
            ctx.sink.add(products.new_zeros(scale_E.shape[0]).index_add_(0, ids_TK.flatten(), products))
        return dy_TK * scale_E[ids_TK], None, None, None


def sink_chosen(weights_TK: Tensor, ids_TK: Tensor, scale_E: Tensor, sink: GradientSink | None) -> Tensor:
    """Returns the weights of chosen experts, [T, K], each multiplied by its expert's number; whose gradient goes to
    `sink`."""
    return _SinkChosen.apply(weights_TK, ids_TK, scale_E, sink)


def _kept_groups(compared_TE: Tensor, rule: RoutingRule) -> Tensor:
    """Returns what is compared, without the experts outside the groups that each token chooses from."""
    grouped = compared_TE.unflatten(1, (rule.num_groups, -1))
    best = grouped.topk(rule.group_best, dim=-1).values.sum(dim=-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(rule.kept_groups, dim=-1).indices, True)
    return grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)


def choose(
    logits_TE: Tensor,
    rule: RoutingRule,
    correction_E: Tensor | None = None,
    sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid,
    given: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses each token's experts.

    Args:
        logits_TE: the router's.
        rule: of the family.
        correction_E: fp32, of a rule that has one; [1, E] too.
        sigmoid: of the backend.
        given: the ids chosen, int64 [T, k] -> those to take in their place; None for the same.

    Returns:
        Their weights [T, k], differentiable, and ids, int64 [T, k].
    """
    if rule.scores == "softmax of chosen":
        chosen_TK, ids_TK = torch.topk(logits_TE, rule.per_token, dim=-1)
        if given is not None:
            ids_TK = given(ids_TK)
            chosen_TK = logits_TE.gather(1, ids_TK)
        weights_TK = torch.softmax(chosen_TK, dim=-1, dtype=torch.float32)
    else:
        wide_TE = logits_TE.to(torch.float32)
        scores_TE = sigmoid(wide_TE) if rule.scores == "sigmoid" else torch.softmax(wide_TE, dim=-1)
        compared_TE = scores_TE.detach() if correction_E is None else scores_TE.detach() + correction_E
        if rule.kept_groups < rule.num_groups:
            compared_TE = _kept_groups(compared_TE, rule)
        ids_TK = torch.topk(compared_TE, rule.per_token, dim=-1).indices
        if given is not None:
            ids_TK = given(ids_TK)
        weights_TK = scores_TE.gather(1, ids_TK)
    if rule.renormalises:
        least = rule.least if rule.scores == "sigmoid" else 0.0
        sum_T1 = weights_TK.sum(dim=-1, keepdim=True) + least
        weights_TK = weights_TK / (sum_T1.clamp(min=rule.smallest_sum) if rule.smallest_sum else sum_T1)
    if rule.factor != 1.0:
        weights_TK = weights_TK * rule.factor
    return (weights_TK.to(logits_TE.dtype) if rule.rounds else weights_TK), ids_TK


def route(
    logits_TE: Tensor,
    rule: RoutingRule,
    *,
    loops: bool,
    correction_E: Tensor | None = None,
    scaled: Callable[[Tensor, Tensor], Tensor] | None = None,
    sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid,
    given: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Slots]:
    """Chooses experts.

    Args:
        logits_TE, rule, correction_E, sigmoid, given: see `choose`.
        loops: the host is to know how many rows each expert has; see `row_groups`.
        scaled: multiplies weights [T, k] by numbers of their experts, ids [T, k]; None where there are none.

    Returns:
        The weights [T, k] of each token's experts, differentiable, and the slots.
    """
    weights_TK, ids_TK = choose(logits_TE, rule, correction_E, sigmoid, given)
    if scaled is not None:
        weights_TK = scaled(weights_TK, ids_TK)
    sorted_ids, order_N = torch.sort(ids_TK.flatten(), stable=True)
    rows_N = torch.empty_like(order_N)
    rows_N[order_N] = torch.arange(order_N.shape[0], device=order_N.device)
    groups = row_groups(sorted_ids, rule.num_experts, loops=loops)
    return weights_TK, Slots(order_N, rows_N.view_as(ids_TK), groups)
