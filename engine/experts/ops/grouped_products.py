"""Products of rows that lie sorted by expert with one matrix per expert.

    y[n] = x[n] W[e(n)]        G[e] = sum over n with e(n) = e of left[n]^T right[n]

On a GPU both are one launch, which reads on the device where an expert's rows end: the host waits for nothing. It is
one of `engine.experts.kernels`, or torch's (`torch.nn.functional.grouped_mm`) where the backend has none, and for the
gradients of weights. On a CPU they are loops over experts, for which the host knows the ends, with the
backend's own product: faster there than torch's grouped one.

Legend: N rows, E experts, K and M features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.ops.gradients import GradientSink, add_together
from engine.ops.kernels import Product

GROUPED_MULTIPLE = 8
"""On a GPU, rows of all operands are multiples of 16 bytes: of 8 numbers of bfloat16."""


_TOGETHER = 2**24
"""The most numbers, 64 MiB, that are copied to be added in one launch. With more, each keeps the device busy enough."""


class RowGroups(NamedTuple):
    """The rows of each expert: rows [ends[e - 1], ends[e]).

    Args:
        ends: int32 [E], on the device of the rows.
        on_host: the same where loops need it; None where one launch serves all experts.
        by_sender: how many of each expert's rows are of each rank's tokens, in order; empty where all are of this
            rank.
    """

    ends: Tensor
    on_host: tuple[int, ...] | None
    by_sender: tuple[tuple[int, ...], ...] = ()

    def experts_N(self, num_rows: int) -> Tensor:
        """Returns the expert of each row, int64."""
        rows = torch.arange(num_rows, device=self.ends.device)
        return torch.searchsorted(self.ends, rows, right=True)

    def slices(self) -> Iterator[tuple[int, slice]]:
        """Yields the experts that have rows, with these."""
        assert self.on_host is not None
        first = 0
        for expert, end in enumerate(self.on_host):
            if end > first:
                yield expert, slice(first, end)
            first = end

    def summed_apart(self, expert: int, rows: slice) -> Iterator[slice]:
        """Yields the rows of an expert by sender. A gradient that is summed so has the bits of one that each rank sums
        for its own tokens."""
        if not self.by_sender:
            yield rows
            return
        first = rows.start
        for count in self.by_sender[expert]:
            if count:
                yield slice(first, first + count)
            first += count


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
        loops: the host is to know it too; it then waits for the device. Of rows without numbers, on the meta device,
            every expert has as many as any other.
    """
    experts = torch.arange(num_experts, device=sorted_ids_N.device)
    ends = torch.searchsorted(sorted_ids_N, experts, right=True, out_int32=True)
    if not loops:
        return RowGroups(ends, None)
    if ends.device.type == "meta":
        count = sorted_ids_N.shape[0]
        return RowGroups(ends, tuple(count * (expert + 1) // num_experts for expert in range(num_experts)))
    return RowGroups(ends, tuple(ends.tolist()))


def grouped_product(x_NK: Tensor, weights_EKM: Tensor, groups: RowGroups, product: Product) -> Tensor:
    """Returns [N, M]: each row times its expert's matrix."""
    if groups.on_host is None:
        if not x_NK.shape[0]:
            return x_NK.new_empty(0, weights_EKM.shape[2])
        return torch.nn.functional.grouped_mm(x_NK, weights_EKM, offs=groups.ends)
    y = x_NK.new_empty(x_NK.shape[0], weights_EKM.shape[2])
    for expert, rows in groups.slices():
        product(x_NK[rows], weights_EKM[expert], out=y[rows])
    return y


@cache
def grouped_on_device(device: torch.device) -> bool:
    """Returns whether torch's grouped products read on a device where an expert's rows end. On GPUs other than Hopper
    and Blackwell they copy the ends to the host, and launch a product for each expert."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


@cache
def _leaves_empty_groups(device: torch.device) -> bool:
    """Returns whether torch's grouped products write nothing for an expert without rows, as they do on Blackwell."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10


def _outer_products(left_NM: Tensor, right_NK: Tensor, groups: RowGroups) -> Tensor:
    """Returns [E, M, K], left^T right over each expert's own rows, in one launch; zeros where there are none."""
    whole_EMK = torch.nn.functional.grouped_mm(left_NM.t(), right_NK, offs=groups.ends)
    if _leaves_empty_groups(left_NM.device):
        rows_E = groups.ends.diff(prepend=groups.ends.new_zeros(1))
        whole_EMK.masked_fill_((rows_E == 0)[:, None, None], 0.0)
    return whole_EMK


def add_grouped_rows(y_NM: Tensor, bias_EM: Tensor, groups: RowGroups) -> None:
    """Adds to each row, in place, that of its expert."""
    if groups.on_host is None:
        y_NM.add_(bias_EM.index_select(0, groups.experts_N(y_NM.shape[0])))
        return
    for expert, rows in groups.slices():
        y_NM[rows] += bias_EM[expert]


def add_grouped_sums(
    dy_NM: Tensor, groups: RowGroups, blocks: Sequence[Sequence[GradientBlock]], *, counts: bool
) -> None:
    """Adds the sum over each expert's own rows to its sinks.

    Args:
        blocks: for each expert; `columns` says nothing.
        counts: whether it is added at all; the sinks are told of it in any case.
    """
    if not any(blocks):
        return
    if groups.on_host is None and not dy_NM.shape[0]:
        filled = {}
    elif groups.on_host is None:
        # a product with ones, which has the experts' rows added up in fp32, in one order
        ones = dy_NM.new_ones(dy_NM.shape[0], GROUPED_MULTIPLE)
        filled = dict(enumerate(_outer_products(dy_NM, ones, groups)[..., 0]))
    else:
        filled = {}
        for expert, rows in groups.slices():
            parts = [dy_NM[part].sum(dim=0, dtype=torch.float32) for part in groups.summed_apart(expert, rows)]
            filled[expert] = torch.stack(parts).sum(dim=0)
    for expert, own in enumerate(blocks):
        for block in own:
            if counts and expert in filled:
                block.sink.add(filled[expert][block.rows])
            else:
                block.sink.added()


def add_grouped_gradients(
    left_NM: Tensor, right_NK: Tensor, groups: RowGroups, blocks: Sequence[Sequence[GradientBlock]]
) -> None:
    """Adds left^T right, over each expert's own rows, to its sinks.

    Args:
        blocks: for each expert; one without rows reports to its sinks and adds nothing.
    """
    if not any(blocks):
        return
    if groups.on_host is None and not left_NM.shape[0]:
        for block in (block for own in blocks for block in own):
            block.sink.added()
        return
    if groups.on_host is None:
        _add_each(_outer_products(left_NM, right_NK, groups), blocks)
        return
    filled = dict(groups.slices())
    for expert, own in enumerate(blocks):
        for block in own:
            if expert in filled:
                parts = groups.summed_apart(expert, filled[expert])
                block.sink.add_products(
                    [(left_NM[rows, block.rows].t(), right_NK[rows, block.columns]) for rows in parts]
                )
            else:
                block.sink.added()


def _add_each(whole_EMK: Tensor, blocks: Sequence[Sequence[GradientBlock]]) -> None:
    """Adds each expert's gradients to its sinks.

    Those of adapters are small and many: a launch for each would take the host longer than the device. They are made
    dense in fp32 together, which torch adds in one launch to many buffers.
    """
    alike: dict[tuple[Any, ...], list[tuple[int, GradientBlock]]] = {}
    for expert, own in enumerate(blocks):
        for block in own:
            places = block.rows.start, block.rows.stop, block.columns.start, block.columns.stop
            alike.setdefault(places, []).append((expert, block))
    for found in alike.values():
        part = whole_EMK[:, found[0][1].rows, found[0][1].columns]
        if part.numel() > _TOGETHER:
            for expert, block in found:
                block.sink.add(part[expert])
            continue
        wide = part.to(torch.float32, memory_format=torch.contiguous_format)
        add_together([(block.sink, wide[expert]) for expert, block in found])


def add_outer_products(whole_EMK: Tensor, blocks: Sequence[Sequence[GradientBlock]], *, shared: bool) -> None:
    """Adds each expert's gradients, or their sum, to its sinks.

    Args:
        blocks: for each expert; of what all experts share, one group.
        shared: whether they do.
    """
    if not shared:
        _add_each(whole_EMK, blocks)
        return
    total_MK = whole_EMK.sum(dim=0)
    for block in (block for own in blocks for block in own):
        block.sink.add(total_MK[block.rows, block.columns])


def add_common_gradients(left_NM: Tensor, right_NK: Tensor, blocks: Sequence[Sequence[GradientBlock]]) -> None:
    """Adds left^T right, over all rows, to the sinks of what every expert has in common.

    Args:
        blocks: one group of them.
    """
    for block in (block for own in blocks for block in own):
        block.sink.add_product(left_NM[:, block.rows].t(), right_NK[:, block.columns])
