"""A micro-batch of several tenants as the planner traces it: rows of each, whose adapters are alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from engine.models.decoder import Decoder
from engine.ops.attention.token_context import AdapterChoice
from engine.ops.operands import LinearOperands
from engine.ops.products import SEPARATE
from engine.tenants.joint_pass import peers_of
from engine.tenants.span_adapters import Span, SpanChoice


class _Planned(SpanChoice):
    """The choice of a model whose own adapters stand for those of every tenant; see `AdapterChoice`.

    The model that tenants share has none, so that its products with the base are never joined with theirs.
    """

    def chosen(self, operands: LinearOperands) -> LinearOperands:
        return replace(super().chosen(operands), forward_way=SEPARATE, backward_way=SEPARATE)


def even_spans(model: Decoder, num_tokens: int, tenants: int) -> AdapterChoice:
    """Returns the adapters of a micro-batch that so many tenants share evenly.

    Args:
        model: a part, whose adapters stand for those of each.
        num_tokens: of the micro-batch, that its context ranks hold here.
        tenants: at most as many.
    """
    ends: Sequence[int] = [num_tokens * number // tenants for number in range(tenants + 1)]
    spans = [Span(0, first, last) for first, last in pairwise(ends)]
    step = torch.zeros((), dtype=torch.int64, device="meta")
    return _Planned(spans, peers_of({0: (model,)}), lambda number: step, num_tokens)
