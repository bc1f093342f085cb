"""RMSNorm by the compiled kernels; the plain spec is engine.kernels.reference."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.native.arguments import (
    InputUpdate,
    matrix,
    optional_matrix,
    optional_vector,
    threads,
    type_number,
    update_arguments,
    vector,
)
from engine.kernels.native.loader import library


def rmsnorm_forward(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    total: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y = norm(x), or norm(x + residual), times weight.

    Args:
        x: fp32 or bfloat16 [..., F], rows of any stride.
        weight: [F]; read as fp32 whatever its dtype.
        residual: [..., F], added to x first.
        total: where x + residual goes, needed with `residual`; may be x or residual itself.
        out: where y goes, rows of any stride.

    Returns:
        y [..., F] and the reciprocal root mean square, fp32 [..., 1].
    """
    assert (residual is None) == (total is None)
    features = weight.shape[0]
    rows = x.numel() // max(features, 1)
    y = torch.empty(x.shape, dtype=x.dtype) if out is None else out
    rstd = torch.empty(*x.shape[:-1], 1, dtype=torch.float32)
    dtype, wide_weight = x.dtype, weight.to(torch.float32)
    library().engine_rmsnorm_forward(
        threads(), type_number(x), rows, features, *matrix(x, features, dtype=dtype),
        *optional_matrix(residual, features, rows, dtype=dtype), *optional_matrix(total, features, rows, dtype=dtype),
        vector(wide_weight, features), eps, *matrix(y, features, rows, dtype=dtype), rstd.data_ptr(),
    )  # fmt: skip
    return y, rstd


def rmsnorm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    *,
    residual: Tensor | None = None,
    update: InputUpdate | None = None,
    weight_gradient: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """dx of y = norm(x) * weight, in one pass.

    Args:
        dy: fp32 or bfloat16 [..., F].
        x: [..., F], what was normalised (the sum, where forward added a residual).
        weight: [F]; read as fp32.
        rstd: [..., 1] of forward.
        residual: gradient that reaches x on another way, added to dx.
        update: what the adapters on y add to dy.
        weight_gradient: fp32 [F], the weight's gradient is added to it; None where it is frozen.
        out: where dx goes; may be dy or residual.
    """
    features = weight.shape[0]
    rows = x.numel() // max(features, 1)
    dx = torch.empty(x.shape, dtype=x.dtype) if out is None else out
    dtype, wide_weight = x.dtype, weight.to(torch.float32)
    library().engine_rmsnorm_backward(
        threads(), type_number(x), rows, features, *matrix(dy, features, rows, dtype=dtype),
        *matrix(x, features, dtype=dtype), vector(wide_weight, features), vector(rstd, rows),
        *optional_matrix(residual, features, rows, dtype=dtype), *update_arguments(update, features, rows, dtype=dtype),
        *matrix(dx, features, rows, dtype=dtype), optional_vector(weight_gradient, features),
    )  # fmt: skip
    return dx


def rmsnorm_weight_gradient(dy: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
    """dw = sum over tokens of dy * x * rstd, fp32 [F], without dx."""
    features = x.shape[-1]
    rows = x.numel() // max(features, 1)
    gradient = torch.zeros(features, dtype=torch.float32)
    ones = torch.ones(features)
    library().engine_rmsnorm_backward(
        threads(), type_number(x), rows, features, *matrix(dy, features, rows, dtype=x.dtype),
        *matrix(x, features, dtype=x.dtype), vector(ones, features), vector(rstd, rows), None, 0,
        *update_arguments(None, features, rows, dtype=x.dtype), None, 0, gradient.data_ptr(),
    )  # fmt: skip
    return gradient
