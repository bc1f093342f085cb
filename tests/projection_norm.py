"""A plain-torch backend whose norms take the adapters' share in their statistics from H, as a fused kernel does.

The Triton kernel cannot run on several ranks of a test; what it is handed can be tried with this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from engine.kernels.records import InputUpdate
from engine.kernels.reference_fused import rmsnorm_backward_with_update
from engine.ops.kernels import REFERENCE, Kernels


def norms_by_projection() -> tuple[Kernels, Callable[[], int]]:
    """The backend, and how many updates came with their H so far."""
    seen = 0

    def norm_backward(
        dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, update: InputUpdate | None, weight_gradient: Tensor | None
    ) -> Tensor:
        nonlocal seen
        if update is None or update.h_TR is None or weight_gradient is not None:
            return REFERENCE.norm_backward(dy, x, weight, rstd, update, weight_gradient)
        seen += 1
        added = REFERENCE.apply_update(torch.zeros_like(dy), update)
        return rmsnorm_backward_with_update(dy, x, weight, rstd, added, update.dh_TR, update.h_TR * update.h_scale)

    return replace(REFERENCE, norm_backward=norm_backward), lambda: seen
