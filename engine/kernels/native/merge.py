"""Adding a low-rank update into rows of a stored weight by the compiled kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.native.arguments import DTYPES, matrix, type_number
from engine.kernels.native.loader import library, native_status


def can_merge(dtype: torch.dtype) -> bool:
    """Returns whether the kernel takes weights of this dtype."""
    return dtype in DTYPES and native_status().available


def merge_rows(weight_OI: Tensor, b_OR: Tensor, a_RI: Tensor, out_OI: Tensor) -> tuple[float, float, float]:
    """Computes out = weight + b a, summed in fp32 and rounded once; on this thread, without the interpreter's lock.

    Args:
        weight_OI: fp32 or bfloat16.
        b_OR, a_RI: fp32, the scale in either.
        out_OI: of the weight's dtype; may be the weight.

    Returns:
        The largest absolute difference that rounding made, the sum of the squares of all differences, and that of the
        exact values.
    """
    (rows, columns), rank = weight_OI.shape, a_RI.shape[0]
    rounding = torch.zeros(3, dtype=torch.float64)
    library().engine_merge(
        type_number(weight_OI),
        rows,
        columns,
        rank,
        *matrix(weight_OI, dtype=weight_OI.dtype),
        *matrix(b_OR, rank, rows),
        *matrix(a_RI, columns),
        *matrix(out_OI, columns, rows, dtype=weight_OI.dtype),
        rounding.data_ptr(),
    )
    most, squared_error, squared_value = rounding.tolist()
    return most, squared_error, squared_value
