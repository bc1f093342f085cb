"""Rows on their way to the ranks that hold their experts, and back.

Each rank of the axis holds as many experts as the others, in rank order, and has tokens of its own. It sends a row for
each pair of a token and an expert that the token's router chose, the ranks' experts compute, and the rows come back to
where they were. A rank without rows takes part in every exchange, forward and backward.

Legend: N rows of this rank's tokens, R rows of this rank's experts, E experts, F features.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from engine.distributed.collectives import all_to_all
from engine.distributed.mesh import Axis, Unconnected


class _Exchanged(torch.autograd.Function):
    """An uneven all-to-all, whose gradient goes the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, sent: tuple[int, ...], received: tuple[int, ...]) -> Tensor:
        ctx.axis, ctx.sent, ctx.received = axis, sent, received
        return all_to_all(x, axis, sent=sent, received=received)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(dy, ctx.axis, sent=ctx.received, received=ctx.sent), None, None, None


@dataclass(frozen=True, slots=True)
class Route:
    """Where the rows of a micro-batch go.

    Args:
        sizes: rows of each expert here, once they have arrived.
        axis: the ranks.
        sent, received: rows to and from each rank.
        order_R: the place in the order of arrival of each row, which then lie by expert; None where rows stay.
    """

    sizes: list[int]
    axis: Axis
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    order_R: Tensor | None = None

    def out(self, rows_NF: Tensor) -> Tensor:
        """Returns the rows of this rank's experts, [R, ...], for those of its tokens, which lie by expert. Collective;
        a gradient goes the way back."""
        if self.order_R is None:
            return rows_NF
        arrived: Tensor = _Exchanged.apply(rows_NF, self.axis, self.sent, self.received)
        return arrived[self.order_R]

    def back(self, rows_RF: Tensor) -> Tensor:
        """Returns the rows of this rank's tokens, [N, ...], for those of its experts. Collective; a gradient goes out
        again."""
        if self.order_R is None:
            return rows_RF
        arrived: Tensor = _Exchanged.apply(rows_RF[inverse_order(self.order_R)], self.axis, self.received, self.sent)
        return arrived


def planned_route(chosen_N: Tensor, experts: int, axis: Axis) -> Route:
    """Tells the ranks how many rows come to each expert; the host waits here, once a layer. Collective.

    Args:
        chosen_N: int64, the expert of each row.
        experts: on all ranks.
        axis: the ranks.
    """
    if axis.size == 1:
        return Route(_sizes(chosen_N, experts), axis)
    here = experts // axis.size
    if chosen_N.is_meta:
        counts_E = chosen_N.new_empty(experts)
    else:
        counts_E = torch.bincount(chosen_N, minlength=experts)
    equal = (here,) * axis.size
    arriving_E = all_to_all(counts_E, axis, sent=equal, received=equal)
    if isinstance(axis.group, Unconnected):
        sent, received = axis.group.rows(len(chosen_N), experts)
    else:
        sent, received = torch.stack((counts_E, arriving_E)).view(2, axis.size, here).tolist()
    arrived = sum(map(sum, received))
    experts_E = torch.arange(here, device=chosen_N.device).repeat(axis.size)
    experts_R = torch.repeat_interleave(experts_E, arriving_E, output_size=arrived)
    return Route(
        sizes=[sum(counts) for counts in zip(*received, strict=True)],
        axis=axis,
        sent=tuple(map(sum, sent)),
        received=tuple(map(sum, received)),
        order_R=experts_R.argsort(stable=True),
    )


def inverse_order(order: Tensor) -> Tensor:
    """Returns the place of each row in an order of rows, int64 [N]."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


def _sizes(chosen_N: Tensor, experts: int) -> list[int]:
    """Returns how many rows chose each expert; of rows without numbers, as many each as any other."""
    if chosen_N.is_meta:
        ends = [len(chosen_N) * expert // experts for expert in range(experts + 1)]
        return [end - start for start, end in pairwise(ends)]
    counts: list[int] = torch.bincount(chosen_N, minlength=experts).tolist()
    return counts
