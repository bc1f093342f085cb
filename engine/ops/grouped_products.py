"""Products of rows that lie sorted by expert with one matrix per expert.

    y[n] = x[n] W[e(n)]        G[e] = sum over n with e(n) = e of left[n]^T right[n]

On a GPU both are one launch (`torch.nn.functional.grouped_mm`), which reads on the device where an expert's rows end:
the host waits for nothing. On a CPU they are loops over experts, for which the host knows the ends, with the
backend's own product: faster there than torch's grouped one.

Legend: N rows, E experts, K and M features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.ops.gradients import GradientSink

Product = Callable[[Tensor, Tensor], Tensor]
"""A backend's product of two matrices."""
GROUPED_MULTIPLE = 8
"""On a GPU, rows of all operands are multiples of 16 bytes: of 8 numbers of bfloat16."""


class RowGroups(NamedTuple):
    """The rows of each expert: rows [ends[e - 1], ends[e]).

    Args:
        ends: int32 [E], on the device of the rows.
        on_host: the same where loops need it; None where one launch serves all experts.
    """

    ends: Tensor
    on_host: tuple[int, ...] | None

    def slices(self) -> Iterator[tuple[int, slice]]:
        """Yields the experts that have rows, with these."""
        assert self.on_host is not None
        first = 0
        for expert, end in enumerate(self.on_host):
            if end > first:
                yield expert, slice(first, end)
            first = end


class GradientBlock(NamedTuple):
    """Where a part of an expert's weight gradient goes.

    Args:
        sink: of the part.
        rows, columns: the part, within the whole product's [M, K].
    """

    sink: GradientSink
    rows: slice
    columns: slice


def row_groups(sorted_ids_N: Tensor, num_experts: int, *, loops: bool) -> RowGroups:
    """Returns where each expert's rows end.

    Args:
        sorted_ids_N: int64, ascending.
        loops: the host is to know it too; it then waits for the device.
    """
    experts = torch.arange(num_experts, device=sorted_ids_N.device)
    ends = torch.searchsorted(sorted_ids_N, experts, right=True, out_int32=True)
    return RowGroups(ends, tuple(ends.tolist()) if loops else None)


def grouped_product(x_NK: Tensor, weights_EKM: Tensor, groups: RowGroups, product: Product) -> Tensor:
    """Returns [N, M]: each row times its expert's matrix."""
    if groups.on_host is None:
        return torch.nn.functional.grouped_mm(x_NK, weights_EKM, offs=groups.ends)
    y = x_NK.new_empty(x_NK.shape[0], weights_EKM.shape[2])
    for expert, rows in groups.slices():
        y[rows] = product(x_NK[rows], weights_EKM[expert])
    return y


def add_grouped_gradients(
    left_NM: Tensor, right_NK: Tensor, groups: RowGroups, blocks: Sequence[Sequence[GradientBlock]]
) -> None:
    """Adds left^T right, over each expert's own rows, to its sinks.

    Args:
        blocks: for each expert; one without rows reports to its sinks and adds nothing.
    """
    if not any(blocks):
        return
    if groups.on_host is None:
        whole = torch.nn.functional.grouped_mm(left_NM.t(), right_NK, offs=groups.ends)
        for gradient, own in zip(whole, blocks, strict=True):
            for block in own:
                block.sink.add(gradient[block.rows, block.columns])
        return
    filled = dict(groups.slices())
    for expert, own in enumerate(blocks):
        for block in own:
            if expert in filled:
                rows = filled[expert]
                block.sink.add_product(left_NM[rows, block.rows].t(), right_NK[rows, block.columns])
            else:
                block.sink.added()
