"""A plain-torch backend whose norms take the adapters' share in their statistics from H, as a fused kernel does.

The Triton kernel cannot run on several ranks of a test; what it is handed can be tried with this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from engine.kernels.records import InputUpdate
from engine.ops.kernels import REFERENCE, Kernels


def rmsnorm_backward_with_update(
    dy_TF: Tensor, x_TF: Tensor, weight_F: Tensor, rstd_T1: Tensor, update_TF: Tensor, dh_TR: Tensor, h_TR: Tensor
) -> Tensor:
    """dx = rstd (g - xhat mean(g xhat)) for g = (dy + u) w, where the share of u in the mean is taken from dH . H.

    Args:
        update_TF: u = drop'(dH A), what adapters on y add to dy.
        dh_TR, h_TR: gradient of H, and H = drop(y) A^T.
    """
    wide = torch.float64 if x_TF.dtype == torch.float64 else torch.float32
    xhat = x_TF.to(wide) * rstd_T1
    weight, dy = weight_F.to(wide), dy_TF.to(wide)
    share_T1 = (dy * weight * xhat).sum(-1, keepdim=True) + (dh_TR.to(wide) * h_TR.to(wide)).sum(-1, keepdim=True)
    g = (dy + update_TF.to(wide)) * weight
    return ((g - xhat * share_T1 / x_TF.shape[-1]) * rstd_T1).to(x_TF.dtype)


def norms_by_projection() -> tuple[Kernels, Callable[[], int]]:
    """The backend, and how many updates came with their H so far."""
    seen = 0

    def norm_backward(
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        rstd: Tensor,
        update: InputUpdate | None,
        weight_gradient: Tensor | None,
        residual: Tensor | None = None,
    ) -> Tensor:
        nonlocal seen
        if update is None or update.h_TR is None or weight_gradient is not None:
            return REFERENCE.norm_backward(dy, x, weight, rstd, update, weight_gradient, residual)
        seen += 1
        added = REFERENCE.apply_update(torch.zeros_like(dy), update)
        dx = rmsnorm_backward_with_update(dy, x, weight, rstd, added, update.dh_TR, update.h_TR * update.h_scale)
        return dx if residual is None else dx + residual

    return replace(REFERENCE, norm_backward=norm_backward), lambda: seen
