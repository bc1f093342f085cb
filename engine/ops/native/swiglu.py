"""SwiGLU by the compiled kernels; the plain spec is triton_kernels.reference."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.native.arguments import InputUpdate, matrix, optional_matrix, threads, type_number, update_arguments
from engine.ops.native.loader import library


def swiglu_forward(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """silu(gate) * up.

    Args:
        gate_up: fp32 or bfloat16 [..., 2F], gate then up, rows of any stride.
        out: where y [..., F] goes, rows of any stride.
    """
    features = gate_up.shape[-1] // 2
    rows = gate_up.numel() // max(2 * features, 1)
    y = gate_up.new_empty(*gate_up.shape[:-1], features) if out is None else out
    library().engine_swiglu_forward(
        threads(), type_number(gate_up), rows, features, *matrix(gate_up, 2 * features, dtype=gate_up.dtype),
        *matrix(y, features, rows, dtype=gate_up.dtype),
    )  # fmt: skip
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
        dy: fp32 or bfloat16 [..., F].
        gate_up: [..., 2F] of the same dtype, forward's input.
        update: what the adapters on y add to dy.
        y: [..., F], forward's output is written there once more.
        out: where the gradient goes; may be gate_up.
    """
    features = gate_up.shape[-1] // 2
    rows = gate_up.numel() // max(2 * features, 1)
    dtype = gate_up.dtype
    gradient = torch.empty(gate_up.shape, dtype=dtype) if out is None else out
    library().engine_swiglu_backward(
        threads(), type_number(gate_up), rows, features, *matrix(dy, features, rows, dtype=dtype),
        *matrix(gate_up, 2 * features, dtype=dtype), *update_arguments(update, features, rows, dtype=dtype),
        *matrix(gradient, 2 * features, rows, dtype=dtype), *optional_matrix(y, features, rows, dtype=dtype),
    )  # fmt: skip
    return gradient
