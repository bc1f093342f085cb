"""The second stage of every reduction here: partial results, one per program, summed in a fixed order.

out = scale * sum over s of partial[s], or added to its contents. No atomics, so the same bits in every run. Several
results of one kernel are summed by one launch.

Bytes moved: S M N fp32 read, M N written (read too where added).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import triton.language as tl
from torch import Tensor

from engine.kernels.triton.launch import ceil_div, kernel, power_of_2

_FEW = 1 << 16
"""Up to so many results there are too few programs to hide the latency of one partial result after the other: long sums
are taken sixteen at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sum:
    """One result, and the partials that it is summed from.

    Args:
        partial_SMN: fp32; contiguous columns. S may be 0, which gives zeros.
        out_MN: any dtype; contiguous columns, rows any distance apart.
        scale: of the sum.
    """

    partial_SMN: Tensor
    out_MN: Tensor
    scale: float = 1.0


@kernel
def _sum_kernel(
    sums,
    partial_stride,
    row_stride,
    ADD: tl.constexpr,
    PARTIALS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Takes in `sums` a tuple for each result: first program, partial pointer, S, out pointer and stride, M, N,
    scale."""
    program = tl.program_id(0)
    first_program, partial_ptr, num_partials, out_ptr, out_stride, num_rows, num_columns, scale = sums[0]
    for index in tl.static_range(1, len(sums)):
        here = program >= sums[index][0]
        first_program = tl.where(here, sums[index][0], first_program)
        partial_ptr = tl.where(here, sums[index][1], partial_ptr)
        num_partials = tl.where(here, sums[index][2], num_partials)
        out_ptr = tl.where(here, sums[index][3], out_ptr)
        out_stride = tl.where(here, sums[index][4], out_stride)
        num_rows = tl.where(here, sums[index][5], num_rows)
        num_columns = tl.where(here, sums[index][6], num_columns)
        scale = tl.where(here, sums[index][7], scale)
    rows_M = (program - first_program).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns_N = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    ok_MN = (rows_M < num_rows)[:, None] & (columns_N < num_columns)[None, :]
    place_MN = rows_M[:, None] * row_stride + columns_N[None, :]
    if PARTIALS == 1:
        partial = partial_ptr + place_MN
        total_MN = tl.zeros([ROWS, COLUMNS], tl.float32)
        for _ in range(num_partials):
            total_MN += tl.load(partial, mask=ok_MN, other=0.0)
            partial += partial_stride
    else:
        total_SMN = tl.zeros([PARTIALS, ROWS, COLUMNS], tl.float32)
        for start in range(0, num_partials, PARTIALS):
            partials_S = start + tl.arange(0, PARTIALS).to(tl.int64)
            ok_SMN = (partials_S < num_partials)[:, None, None] & ok_MN[None, :, :]
            partial = partial_ptr + (partials_S * partial_stride)[:, None, None] + place_MN[None, :, :]
            total_SMN += tl.load(partial, mask=ok_SMN, other=0.0)
        total_MN = tl.sum(total_SMN, 0)
    total_MN *= scale
    out = out_ptr + rows_M[:, None] * out_stride + columns_N[None, :]
    if ADD:
        total_MN += tl.load(out, mask=ok_MN, other=0.0).to(tl.float32)
    tl.store(out, total_MN, mask=ok_MN)


def sum_all(sums: Sequence[Sum], *, add: bool = False) -> None:
    """Writes scale * partial.sum(0) into each `out`, or adds it, in one launch.

    Args:
        sums: their partials have the same strides, and their results one dtype.
        add: to the contents of `out`.
    """
    sums = [one for one in sums if one.out_MN.numel() > 0]
    if not sums:
        return
    num_columns = max(one.out_MN.shape[1] for one in sums)
    few = sum(one.out_MN.numel() for one in sums) <= _FEW
    partials = 16 if few and max(one.partial_SMN.shape[0] for one in sums) >= 32 else 1
    columns = power_of_2(num_columns, 1, 256 // (4 if partials > 1 else 1))
    rows = 1024 // (partials * columns)
    records: list[tuple[object, ...]] = []
    program = 0
    for one in sums:
        num_partials, *shape = one.partial_SMN.shape
        records.append(
            (program, one.partial_SMN, num_partials, one.out_MN, one.out_MN.stride(0), *shape, float(one.scale))
        )
        program += ceil_div(shape[0], rows)
    partial_stride, row_stride, _ = sums[0].partial_SMN.stride()
    _sum_kernel[(program, ceil_div(num_columns, columns))](
        tuple(records), partial_stride, row_stride, ADD=add, PARTIALS=partials, ROWS=rows, COLUMNS=columns, num_warps=4
    )


def sum_partials(partial_SMN: Tensor, out_MN: Tensor, *, scale: float = 1.0, add: bool = False) -> None:
    """Computes `sum_all` of one result."""
    sum_all([Sum(partial_SMN=partial_SMN, out_MN=out_MN, scale=scale)], add=add)
