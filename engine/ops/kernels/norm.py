"""RMSNorm, y = x / sqrt(mean(x^2) + eps) * w.

norm_forward(x [..., F], weight [F], eps, out, added, total) -> 1 / rms [..., 1]: y into `out`. With `added` [..., F] of
x's dtype, y is that of x + added, rounded, which goes to `total` [..., F].

norm_backward(dy, x, weight, rstd, update, weight_gradient, residual) -> dx [..., F], for a gradient dy that still lacks
`update`, an `InputUpdate` or None. Adds the weight's gradient to `weight_gradient` [F], fp32, if given. Adds `residual`
[..., F] of x's dtype, the gradient that x has from elsewhere, to dx as it was rounded, if given.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.native import norm
from engine.kernels.records import InputUpdate
from engine.ops.kernels.op import Op, like, wide


def _forward(
    x: Tensor, weight: Tensor, eps: float, out: Tensor, added: Tensor | None = None, total: Tensor | None = None
) -> Tensor:
    if added is not None:
        x = torch.add(x, added, out=total)
    y, rstd = reference.rmsnorm_forward(x, weight, eps)
    out.copy_(y)
    return rstd


def forward_shape(x: Tensor, *_: object) -> Tensor:
    """Allocates the statistics."""
    return wide(x, (*x.shape[:-1], 1))


NORM_FORWARD = Op(
    reference=_forward,
    native=norm.norm_forward,
    triton="engine.kernels.triton.ops:norm_forward",
    shape=forward_shape,
)


def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    update: InputUpdate | None,
    weight_gradient: Tensor | None,
    residual: Tensor | None = None,
) -> Tensor:
    if update is not None:
        dy = reference.apply_update(dy, update)
    if weight_gradient is not None:
        weight_gradient.add_(reference.rmsnorm_weight_gradient(dy, x, rstd))
    dx = reference.rmsnorm_backward(dy, x, weight, rstd)
    return dx if residual is None else dx.add_(residual)


NORM_BACKWARD = Op(
    reference=_backward,
    native=norm.norm_backward,
    triton="engine.kernels.triton.ops:norm_backward",
    shape=lambda dy, x, *_: like(x),
)
