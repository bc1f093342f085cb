"""The choice of each token's experts, and the tokens' rows sorted by it.

    logits = x W^T        probabilities = softmax(logits) in fp32        k largest of them, which may be renormalised

Each pair of a token and one of its k experts is a slot: slot t k + i is token t's i-th choice. Rows of experts are the
slots, sorted by expert and then by token, so that no token is dropped and no expert's order depends on another's.
What the experts return is summed over a token's slots in the order of its choices: the result does not depend on where
experts are computed, nor on how many rows the others have.

Legend: T tokens, H features of a token, E experts, k experts of a token, N = T k slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.ops.gradients import GradientSink
from engine.ops.grouped_products import RowGroups, row_groups


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingRule:
    """How a family's router chooses.

    Args:
        num_experts, per_token: E and k.
        renormalises: the chosen experts' probabilities are divided by their sum.
        rounds: these weights are rounded to the dtype of the activations; otherwise they stay fp32.
    """

    num_experts: int
    per_token: int
    renormalises: bool
    rounds: bool


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
        rows = torch.arange(self.order_N.shape[0], device=self.order_N.device)
        return torch.searchsorted(self.groups.ends, rows, right=True)

    def gather(self, x_TF: Tensor) -> Tensor:
        """Returns [N, F]: each row's token."""
        return x_TF.index_select(0, self.tokens_N)

    def combine(self, y_NF: Tensor, weights_TK: Tensor | None = None) -> Tensor:
        """Returns [T, F]: the sum over each token's slots, in their order and in fp32, weighted where asked."""
        total = y_NF.new_zeros(self.rows_TK.shape[0], y_NF.shape[1], dtype=torch.float32)
        for slot, rows_T in enumerate(self.rows_TK.unbind(1)):
            part = y_NF.index_select(0, rows_T).to(torch.float32)
            if weights_TK is None:
                total.add_(part)
            else:
                total.addcmul_(part, weights_TK[:, slot, None].to(torch.float32))
        return total.to(y_NF.dtype)


class _SinkLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_EH: Tensor, sink: GradientSink | None) -> Tensor:
        ctx.save_for_backward(x_TH, weight_EH)
        ctx.sink = sink
        return torch.mm(x_TH, weight_EH.t())

    @staticmethod
    def backward(ctx: Any, dy_TE: Tensor) -> tuple[Tensor | None, None, None]:
        x_TH, weight_EH = ctx.saved_tensors
        if ctx.sink is not None:
            ctx.sink.add_product(dy_TE.t(), x_TH)
        return torch.mm(dy_TE, weight_EH) if ctx.needs_input_grad[0] else None, None, None


def sink_linear(x_TH: Tensor, weight_EH: Tensor, sink: GradientSink | None) -> Tensor:
    """Returns x W^T, [T, E], for a small weight that every rank holds whole; its gradient goes to `sink`."""
    return _SinkLinear.apply(x_TH, weight_EH, sink)


def route(logits_TE: Tensor, rule: RoutingRule, *, loops: bool) -> tuple[Tensor, Slots]:
    """Chooses experts.

    Args:
        logits_TE: the router's.
        rule: of the family.
        loops: the host is to know how many rows each expert has; see `row_groups`.

    Returns:
        The weights [T, k] of each token's experts, differentiable, and the slots.
    """
    probabilities = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
    weights_TK, ids_TK = torch.topk(probabilities, rule.per_token, dim=-1)
    if rule.renormalises:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    if rule.rounds:
        weights_TK = weights_TK.to(logits_TE.dtype)
    sorted_ids, order_N = torch.sort(ids_TK.flatten(), stable=True)
    rows_N = torch.empty_like(order_N)
    rows_N[order_N] = torch.arange(order_N.shape[0], device=order_N.device)
    groups = row_groups(sorted_ids, rule.num_experts, loops=loops)
    return weights_TK, Slots(order_N, rows_N.view_as(ids_TK), groups)
