"""The adapters of one linear of all experts where rows are of several models on one base.

Tokens of one model lie beside each other, in spans (`AdapterChoice`). The base multiplies the rows of an expert
whosever they are. Rows lie sorted by expert, within one by span, and where they have travelled by sender; adapters
multiply those of one span alone, with the shapes that these products have where its model is alone, and so with the
same bits. An expert's rows of a span lie beside each other, but a factor that experts share, and a compiled kernel,
take those of all experts: so a span's are copied together first.

Legend: T tokens, N rows, E experts, S spans, R columns of the widest adapters, others as in `grouped_adapters`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from engine.experts.ops.grouped_adapters import ExpertRows, GroupedLowRank, SpanRows
from engine.experts.ops.grouped_products import RowGroups, row_groups
from engine.experts.ops.routed_experts import GroupedOperands
from engine.experts.ops.routing import Slots
from engine.ops.attention.token_context import AdapterChoice
from engine.ops.kernels import Kernels


def with_choice(operands: GroupedOperands, choice: AdapterChoice) -> GroupedOperands:
    """Returns the operands, which have no adapters, with those of each span of tokens."""
    own = tuple(
        _Own(span, found[0].low_rank, found[1])
        for span, found in enumerate(choice.each(operands.name))
        if found is not None
    )
    return replace(operands, low_rank=SpanAdapters(own=own) if own else None, grouped=None)


def groups_by_span(slots: Slots, lengths: Sequence[int], *, loops: bool) -> RowGroups:
    """Returns the groups of the slots by expert and span, E S of them, those of an expert beside each other.

    Args:
        slots: sorted by expert.
        lengths: tokens of each span, in order.
        loops: as of `row_groups`.
    """
    device, num_spans = slots.order_N.device, len(lengths)
    span_T = torch.cat([torch.full((length,), span, device=device) for span, length in enumerate(lengths)])
    both_N = slots.experts_N * num_spans + span_T.index_select(0, slots.tokens_N)
    return row_groups(both_N, slots.groups.ends.shape[0] * num_spans, loops=loops)


def taken_apart(groups: RowGroups, sizes: Sequence[int]) -> tuple[RowGroups, tuple[SpanRows, ...]]:
    """Takes groups by expert and span apart.

    Args:
        groups: of `groups_by_span`, or what an exchange made of them.
        sizes: rows of each span where all are of this rank; where they have travelled, `groups` says how many.

    Returns:
        The groups by expert, and the rows of each span.
    """
    num_spans, ends = len(sizes), groups.ends
    if groups.by_sender:
        sizes = [sum(map(sum, groups.by_sender[span::num_spans])) for span in range(num_spans)]
    counts_ES = torch.diff(ends, prepend=ends.new_zeros(1)).view(-1, num_spans)
    order_N = torch.sort(groups.experts_N(sum(sizes)) % num_spans, stable=True).indices
    on_host = None
    if groups.on_host is not None:
        on_host = [end - start for start, end in zip((0, *groups.on_host), groups.on_host, strict=False)]
    spans = []
    for span, index_N in enumerate(order_N.split(list(sizes))):
        own = RowGroups(
            counts_ES[:, span].cumsum(0).to(torch.int32),
            None if on_host is None else tuple(accumulate(on_host[span::num_spans])),
            groups.by_sender[span::num_spans],
        )
        spans.append(SpanRows(index_N, own))
    last = slice(num_spans - 1, None, num_spans)
    return RowGroups(ends[last].contiguous(), None if groups.on_host is None else groups.on_host[last]), tuple(spans)


class _Own(NamedTuple):
    """The adapters of one span.

    Args:
        span: its number.
        low_rank: of its model.
        step: of that model's optimizer, 0-dim int64; a coordinate of its dropout masks.
    """

    span: int
    low_rank: GroupedLowRank
    step: Tensor

    @property
    def width(self) -> int:
        """The columns of H."""
        return self.low_rank.a_ERI.shape[-2]


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanAdapters:
    """The adapters of all spans; `ExpertAdapters` says what its functions do.

    Args:
        own: of each span whose model has adapters here.
    """

    own: tuple[_Own, ...]

    @property
    def drops(self) -> bool:
        return any(own.low_rank.drops for own in self.own)

    @property
    def lies_beside(self) -> bool:
        return False

    def _each(self, rows: ExpertRows) -> Iterator[tuple[_Own, Tensor, ExpertRows]]:
        """Yields the adapters of each span, the places of its rows, and the rows as its model alone has them."""
        for own in self.own:
            index_N, groups = rows.spans[own.span]
            coordinates = None if rows.coordinates_N is None else rows.coordinates_N.index_select(0, index_N)
            context = replace(rows.context, step=own.step)
            yield own, index_N, ExpertRows(groups=groups, coordinates_N=coordinates, context=context)

    def _wide(self, like_NF: Tensor) -> Tensor:
        """Returns zeros [N, R], for what is none in rows without adapters."""
        return like_NF.new_zeros(like_NF.shape[0], max(own.width for own in self.own))

    def project(self, x_NI: Tensor, rows: ExpertRows, kernels: Kernels) -> Tensor:
        h = self._wide(x_NI)
        for own, index_N, part in self._each(rows):
            h[index_N, : own.width] = own.low_rank.project(x_NI.index_select(0, index_N), part, kernels)
        return h

    def expand(self, y_NO: Tensor, h_NR: Tensor, rows: ExpertRows) -> None:
        for own, index_N, part in self._each(rows):
            y = y_NO.index_select(0, index_N)
            own.low_rank.expand(y, _columns(own, h_NR, index_N), part)
            y_NO[index_N] = y

    def back_through_b(self, dy_NO: Tensor, rows: ExpertRows) -> Tensor:
        dh = self._wide(dy_NO)
        for own, index_N, part in self._each(rows):
            dh[index_N, : own.width] = own.low_rank.back_through_b(dy_NO.index_select(0, index_N), part)
        return dh

    def dots(self, dh_NR: Tensor, h_NR: Tensor, rows: ExpertRows) -> Tensor:
        total = dh_NR.new_zeros(dh_NR.shape[0], dtype=torch.float32)
        for own, index_N, part in self._each(rows):
            given = (_columns(own, one, index_N) for one in (dh_NR, h_NR))
            total[index_N] = own.low_rank.dots(*given, part)
        return total

    def add_b_gradients(self, dy_NO: Tensor, h_NR: Tensor, rows: ExpertRows) -> None:
        for own, index_N, part in self._each(rows):
            own.low_rank.add_b_gradients(dy_NO.index_select(0, index_N), _columns(own, h_NR, index_N), part)

    def through_a(self, dx_NI: Tensor | None, dh_NR: Tensor, x_NI: Tensor, rows: ExpertRows, kernels: Kernels) -> None:
        for own, index_N, part in self._each(rows):
            dx = None if dx_NI is None else dx_NI.index_select(0, index_N)
            dh = _columns(own, dh_NR, index_N)
            own.low_rank.through_a(dx, dh, x_NI.index_select(0, index_N), part, kernels)
            if dx_NI is not None and dx is not None:
                dx_NI[index_N] = dx


def _columns(own: _Own, of_NR: Tensor, index_N: Tensor) -> Tensor:
    """Returns a span's rows of H, as wide as its adapters."""
    return of_NR[:, : own.width].index_select(0, index_N)
