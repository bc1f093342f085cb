"""RMSNorm by the compiled kernels; the plain spec is engine.kernels.reference."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.native.arguments import (
    InputUpdate,
    matrix,
    optional_vector,
    threads,
    type_number,
    update_arguments,
    vector,
)
from engine.kernels.native.loader import library


def rmsnorm_forward(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Computes y = norm(x) * weight.

    Args:
        x: fp32 or bfloat16 [..., F], rows of any stride.
        weight: [F]; read as fp32 whatever its dtype.
        out: where y goes, rows of any stride.

    Returns:
        y [..., F] and the reciprocal root mean square, fp32 [..., 1].
    """
    features = weight.shape[0]
    rows = x.numel() // max(features, 1)
    y = torch.empty(x.shape, dtype=x.dtype) if out is None else out
    rstd = torch.empty(*x.shape[:-1], 1, dtype=torch.float32)
    dtype, wide_weight = x.dtype, weight.to(torch.float32)
    library().engine_rmsnorm_forward(
        threads(),
        type_number(x),
        rows,
        features,
        *matrix(x, features, dtype=dtype),
        vector(wide_weight, features),
        eps,
        *matrix(y, features, rows, dtype=dtype),
        rstd.data_ptr(),
    )
    return y, rstd


def rmsnorm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    *,
    update: InputUpdate | None = None,
    weight_gradient: Tensor | None = None,
) -> Tensor:
    """Computes dx of y = norm(x) * weight, in one pass.

    Args:
        dy: fp32 or bfloat16 [..., F].
        x: [..., F], the norm's input.
        weight: [F]; read as fp32.
        rstd: [..., 1] of forward.
        update: the adapters' part of dy.
        weight_gradient: fp32 [F], the weight's gradient is added to it; None where it is frozen.
    """
    features = weight.shape[0]
    rows = x.numel() // max(features, 1)
    dx = torch.empty(x.shape, dtype=x.dtype)
    dtype, wide_weight = x.dtype, weight.to(torch.float32)
    library().engine_rmsnorm_backward(
        threads(),
        type_number(x),
        rows,
        features,
        *matrix(dy, features, rows, dtype=dtype),
        *matrix(x, features, dtype=dtype),
        vector(wide_weight, features),
        vector(rstd, rows),
        *update_arguments(update, features, rows, dtype=dtype),
        *matrix(dx, features, rows, dtype=dtype),
        optional_vector(weight_gradient, features),
    )
    return dx


def norm_forward(
    x: Tensor, weight: Tensor, eps: float, out: Tensor, added: Tensor | None = None, total: Tensor | None = None
) -> Tensor:
    """Computes the op of this name; see engine.ops.kernels.norm."""
    if added is not None:
        x = torch.add(x, added, out=total)
    return rmsnorm_forward(x, weight, eps, out=out)[1]


def norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    update: InputUpdate | None,
    weight_gradient: Tensor | None,
    residual: Tensor | None = None,
) -> Tensor:
    """Computes the op of this name; see engine.ops.kernels.norm."""
    dx = rmsnorm_backward(dy, x, weight, rstd, update=update, weight_gradient=weight_gradient)
    return dx if residual is None else dx.add_(residual)
