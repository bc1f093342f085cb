"""Products of activations with frozen weights by the compiled kernel, where it measured faster than torch's."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.native.arguments import matrix, threads
from engine.ops.native.loader import library, native_status

FEWEST = 128
"""Rows, columns and depth from which on packing the right operand pays (measured at 128, 256, 512 and 1024 rows)."""
FEWEST_BY_ROWS = 512
"""Rows of the left operand where the right one is a matrix and not the transpose of one: that takes longer to pack."""


def multiply(left_TK: Tensor, right_KN: Tensor, *, out: Tensor | None = None) -> Tensor:
    """left right, by the compiled kernel whatever the sizes.

    Args:
        left_TK: fp32 [T, K], rows of any stride.
        right_KN: fp32 [K, N], a matrix with rows of any stride or the transpose of one.
        out: where the product goes, [T, N], rows of any stride; overlaps neither operand.
    """
    (rows, depth), columns = left_TK.shape, right_KN.shape[1]
    assert right_KN.shape[0] == depth, (left_TK.shape, right_KN.shape)
    y = left_TK.new_empty(rows, columns) if out is None else out
    transposed = right_KN.stride(1) != 1
    right = matrix(right_KN.t(), depth) if transposed else matrix(right_KN, columns)
    library().engine_product(
        threads(), rows, columns, depth, *matrix(left_TK), *right, int(transposed), *matrix(y, columns, rows)
    )
    return y


def _is_faster(left_TK: Tensor, right_KN: Tensor) -> bool:
    """In fp32 with vectors of 16, and not for small products."""
    return (
        left_TK.dtype == right_KN.dtype == torch.float32
        and min(*left_TK.shape, right_KN.shape[1]) >= FEWEST
        and (left_TK.shape[0] >= FEWEST_BY_ROWS or right_KN.stride(0) == 1)
        and left_TK.stride(1) == 1
        and 1 in right_KN.stride()
        and native_status().instruction_set == "avx512"
    )


def product(left_TK: Tensor, right_KN: Tensor, *, out: Tensor | None = None) -> Tensor:
    """As torch.mm, by whichever of the two is faster."""
    if _is_faster(left_TK, right_KN):
        return multiply(left_TK, right_KN, out=out)
    return torch.mm(left_TK, right_KN, out=out)
