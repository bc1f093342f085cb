"""The second stage of every reduction here: partial results, one per program, summed in a fixed order.

out = scale * sum over s of partial[s], or added to what is there. No atomics, so the same bits in every run.

Bytes moved: S M N fp32 read, M N written (read too where added).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.launch import power_of_2


@triton.jit
def _sum_kernel(
    partial_ptr, partial_stride, out_ptr, out_stride, num_partials, num_rows, num_columns, scale,
    ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows_M = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns_N = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    ok_MN = (rows_M < num_rows)[:, None] & (columns_N < num_columns)[None, :]
    partial = partial_ptr + rows_M[:, None] * num_columns + columns_N[None, :]
    total_MN = tl.zeros([ROWS, COLUMNS], tl.float32)
    for _ in range(num_partials):
        total_MN += tl.load(partial, mask=ok_MN, other=0.0)
        partial += partial_stride
    total_MN *= scale
    out = out_ptr + rows_M[:, None] * out_stride + columns_N[None, :]
    if ADD:
        total_MN += tl.load(out, mask=ok_MN, other=0.0).to(tl.float32)
    tl.store(out, total_MN, mask=ok_MN)


def sum_partials(partial_SMN: Tensor, out_MN: Tensor, *, scale: float = 1.0, add: bool = False) -> None:
    """Writes scale * partial.sum(0) into `out`, or adds it.

    Args:
        partial_SMN: fp32, contiguous.
        out_MN: any dtype; contiguous columns, rows any distance apart.
    """
    num_partials, num_rows, num_columns = partial_SMN.shape
    if out_MN.numel() == 0:
        return
    columns = power_of_2(num_columns, 1, 256)
    rows = 1024 // columns
    grid = (triton.cdiv(num_rows, rows), triton.cdiv(num_columns, columns))
    _sum_kernel[grid](
        partial_SMN, partial_SMN.stride(0), out_MN, out_MN.stride(0), num_partials, num_rows, num_columns, scale,
        ADD=add, ROWS=rows, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
