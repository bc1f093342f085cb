"""Rows on their way to the ranks of their experts, and back: expert parallelism without dropped tokens.

Each rank of the axis holds E / P experts, in rank order, and has tokens of its own. It sends each of its slots, which
lie sorted by expert, to the rank of the expert, and gets from the others the rows of its own experts:

    ends of the own slots  -> counts, to each rank those of its experts      one small all-to-all
    rows by expert         -> all-to-all in uneven parts -> by sender        -> sorted by expert, sender and token
    outputs, by expert     -> by sender -> the all-to-all back               -> where the rows came from

A rank then sums its tokens' outputs in the order of their choices, so that the result has the same bits for any number
of ranks. Ranks and experts may have no rows: every rank starts every exchange, with nothing in it if need be. Exchanges
of rows are started by one operation and waited for by a later one (see ops.routed_experts).

The sizes of an uneven all-to-all are arguments of the host. So the host waits for the device once for each exchange
that is planned, to read 2 E numbers: once a layer in forward, and again where backward recomputes the layer.

Legend: N rows of this rank's tokens, R rows that have arrived, E experts, e of them here, P ranks, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from engine.distributed.collectives import Handle, all_to_all, all_to_all_async
from engine.distributed.mesh import Axis, Unconnected
from engine.experts.ops.grouped_products import RowGroups
from engine.experts.ops.routing import Slots


class Arrival:
    """Rows on their way, or rows that are where they belong.

    Args:
        rows: what the transfer writes into.
        handle: of the transfer; None without one.
        order: int64, the place in the order of arrival of each row; None where that is theirs.
    """

    __slots__ = ("_handle", "_order", "_rows")

    def __init__(self, rows: Tensor, handle: Handle | None = None, order: Tensor | None = None) -> None:
        self._rows, self._handle, self._order = rows, handle, order

    def take(self) -> Tensor:
        """Returns the rows in their order, once they are here; may be called once."""
        if self._handle is not None:
            self._handle.wait()
        rows = self._rows
        del self._rows  # frees their memory, even where this object is kept
        return rows if self._order is None else rows.index_select(0, self._order)


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """Where the rows of one micro-batch go.

    Args:
        axis: the ranks; of size 1, rows stay as they are and where they are.
        groups: the rows of each expert here, once they have arrived.
        sent, received: rows to and from each rank, on the host.
        order_R: int64, the place in the order of arrival of each row.
        places_R: int64, the row of each place.
    """

    axis: Axis
    groups: RowGroups
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    order_R: Tensor | None = None
    places_R: Tensor | None = None

    @property
    def stays(self) -> bool:
        """Whether rows stay where they are."""
        return self.order_R is None

    def out(self, rows_NF: Tensor) -> Arrival:
        """Starts rows, or one number for each, on their way to the ranks of their experts: [N, ...] -> [R, ...].
        Collective."""
        if self.order_R is None:
            return Arrival(rows_NF)
        return Arrival(*all_to_all_async(rows_NF, self.axis, sent=self.sent, received=self.received), self.order_R)

    def back(self, rows_RF: Tensor) -> Arrival:
        """Starts rows on their way back, the adjoint of `out`: [R, ...] -> [N, ...]. Collective."""
        if self.places_R is None:
            return Arrival(rows_RF)
        ordered = rows_RF.index_select(0, self.places_R)
        return Arrival(*all_to_all_async(ordered, self.axis, sent=self.received, received=self.sent))


def plan_exchange(slots: Slots, axis: Axis, *, loops: bool) -> Exchange:
    """Tells the ranks how many rows come to each expert. Collective.

    Args:
        slots: of this rank's tokens, sorted by expert, of all experts.
        axis: the ranks, each with as many experts as the others, in order.
        loops: as of `row_groups`.
    """
    groups = slots.groups
    if axis.size == 1:
        return Exchange(axis=axis, groups=groups)
    counts_E = torch.diff(groups.ends.to(torch.int64), prepend=groups.ends.new_zeros(1, dtype=torch.int64))
    here = counts_E.shape[0] // axis.size
    equal = (here,) * axis.size
    arriving = all_to_all(counts_E, axis, sent=equal, received=equal)
    sent: Sequence[Sequence[int]]
    received: Sequence[Sequence[int]]
    if isinstance(axis.group, Unconnected):
        sent, received = axis.group.rows(slots.order_N.shape[0], counts_E.shape[0])
    else:
        sent, received = torch.stack((counts_E, arriving)).view(2, axis.size, here).tolist()  # the host waits here
    sizes = [sum(counts) for counts in received]
    experts_R = torch.arange(here, device=arriving.device).repeat(axis.size)
    experts_R = torch.repeat_interleave(experts_R, arriving, output_size=sum(sizes))
    order_R = torch.sort(experts_R, stable=True).indices
    places_R = torch.empty_like(order_R)
    places_R[order_R] = torch.arange(order_R.shape[0], device=order_R.device)
    by_expert = list(zip(*received, strict=True))
    ends = arriving.view(axis.size, here).sum(0).cumsum(0).to(torch.int32)
    on_host = tuple(accumulate(map(sum, by_expert))) if loops else None
    return Exchange(
        axis=axis,
        groups=RowGroups(ends, on_host, tuple(by_expert)),
        sent=tuple(sum(counts) for counts in sent),
        received=tuple(sizes),
        order_R=order_R,
        places_R=places_R,
    )
