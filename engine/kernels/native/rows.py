"""Sums of rows by the compiled kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.native.arguments import matrix, optional_vector, threads, type_number, vector
from engine.kernels.native.loader import library


def combine_rows(y_NF: Tensor, rows_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    """Computes engine.kernels.reference.combine_rows, for fp32 and bfloat16 on the CPU, rows of any stride."""
    (tokens, slots), features = rows_TK.shape, y_NF.shape[1]
    out = y_NF.new_empty(tokens, features)
    # referenced here until the call has returned: it is given pointers
    rows, weights = rows_TK.contiguous(), None if weights_TK is None else weights_TK.float().contiguous()
    library().engine_combine_rows(
        threads(),
        type_number(y_NF),
        tokens,
        slots,
        features,
        *matrix(y_NF, features, dtype=y_NF.dtype),
        vector(rows, tokens * slots, torch.int64),
        optional_vector(weights, tokens * slots),
        out.data_ptr(),
    )
    return out
