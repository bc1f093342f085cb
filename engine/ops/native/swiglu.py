"""SwiGLU by the compiled kernels; the plain spec is triton_kernels.reference."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.native.arguments import InputUpdate, matrix, optional_matrix, threads, update_arguments
from engine.ops.native.loader import library


def swiglu_forward(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """silu(gate) * up.

    Args:
        gate_up: fp32 [..., 2F], gate then up, rows of any stride.
        out: where y [..., F] goes, rows of any stride.
    """
    features = gate_up.shape[-1] // 2
    rows = gate_up.numel() // max(2 * features, 1)
    y = torch.empty(*gate_up.shape[:-1], features) if out is None else out
    library().engine_swiglu_forward(
        threads(), rows, features, *matrix(gate_up, 2 * features), *matrix(y, features, rows)
    )
    return y


def swiglu_backward(
    dy: Tensor,
    gate_up: Tensor,
    *,
    update: InputUpdate | None = None,
    y: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """[dgate | dup], in one pass.

    Args:
        dy: fp32 [..., F].
        gate_up: [..., 2F], forward's input.
        update: what the adapters on y add to dy.
        y: [..., F], forward's output is written there once more.
        out: where the gradient goes; may be gate_up.
    """
    features = gate_up.shape[-1] // 2
    rows = gate_up.numel() // max(2 * features, 1)
    gradient = torch.empty(gate_up.shape) if out is None else out
    library().engine_swiglu_backward(
        threads(), rows, features, *matrix(dy, features, rows), *matrix(gate_up, 2 * features),
        *update_arguments(update, features, rows), *matrix(gradient, 2 * features, rows),
        *optional_matrix(y, features, rows),
    )  # fmt: skip
    return gradient
