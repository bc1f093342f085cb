"""The gated norm of heads by the compiled kernels; the plain specification is `engine.hybrids.reference`."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.native.arguments import heads, optional_vector, threads, type_number, vector
from engine.kernels.native.loader import library


def gated_norm_forward(x_TNV: Tensor, z_TNV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """Returns x / rms(x) * weight * silu(z), normalised over V.

    Args:
        x_TNV, z_TNV: fp32 or bfloat16, tokens and heads of any stride.
        weight_V: read as fp32.
    """
    y, shape, dtype = torch.empty(x_TNV.shape, dtype=x_TNV.dtype), x_TNV.shape, x_TNV.dtype
    weight = weight_V.to(torch.float32)
    library().engine_gated_norm_forward(
        threads(),
        type_number(x_TNV),
        *shape,
        *heads(x_TNV, *shape, dtype=dtype),
        *heads(z_TNV, *shape, dtype=dtype),
        vector(weight, shape[2]),
        eps,
        y.data_ptr(),
    )
    return y


def gated_norm_backward(
    dy: Tensor, x_TNV: Tensor, z_TNV: Tensor, weight_V: Tensor, eps: float, weight_gradient: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and z, and adds that of the weight to an fp32 buffer where given."""
    dx, dz = torch.empty(x_TNV.shape, dtype=x_TNV.dtype), torch.empty(z_TNV.shape, dtype=z_TNV.dtype)
    shape, dtype, weight = x_TNV.shape, x_TNV.dtype, weight_V.to(torch.float32)
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    library().engine_gated_norm_backward(
        threads(),
        type_number(x_TNV),
        *shape,
        *heads(dy, *shape, dtype=dtype),
        *heads(x_TNV, *shape, dtype=dtype),
        *heads(z_TNV, *shape, dtype=dtype),
        vector(weight, shape[2]),
        eps,
        dx.data_ptr(),
        dz.data_ptr(),
        optional_vector(weight_gradient, shape[2]),
    )
    return dx, dz
