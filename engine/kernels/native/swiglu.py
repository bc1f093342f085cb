"""SwiGLU by the compiled kernels; the plain spec is engine.kernels.reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.native.arguments import (
    matrix,
    optional_bits,
    optional_matrix,
    threads,
    type_number,
    update_arguments,
)
from engine.kernels.native.loader import library
from engine.kernels.native.low_rank import sections_of_a
from engine.kernels.records import AdapterSection, InputUpdate


def swiglu_forward(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """Computes silu(gate) * up.

    Args:
        gate_up: fp32 or bfloat16 [..., 2F], gate then up, rows of any stride.
        out: where y [..., F] goes, rows of any stride.
    """
    features = gate_up.shape[-1] // 2
    rows = gate_up.numel() // max(2 * features, 1)
    y = gate_up.new_empty(*gate_up.shape[:-1], features) if out is None else out
    library().engine_swiglu_forward(
        threads(),
        type_number(gate_up),
        rows,
        features,
        *matrix(gate_up, 2 * features, dtype=gate_up.dtype),
        *matrix(y, features, rows, dtype=gate_up.dtype),
    )
    return y


def swiglu_backward(
    dy: Tensor,
    gate_up: Tensor,
    update: InputUpdate | None = None,
    y: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Computes [dgate | dup], in one pass.

    Args:
        dy: fp32 or bfloat16 [..., F].
        gate_up: [..., 2F] of the same dtype, forward's input.
        update: the adapters' part of dy.
        y: [..., F], forward's output is written there once more.
        out: where the gradient goes; may be gate_up.
    """
    features = gate_up.shape[-1] // 2
    rows = gate_up.numel() // max(2 * features, 1)
    dtype = gate_up.dtype
    gradient = torch.empty(gate_up.shape, dtype=dtype) if out is None else out
    library().engine_swiglu_backward(
        threads(),
        type_number(gate_up),
        rows,
        features,
        *matrix(dy, features, rows, dtype=dtype),
        *matrix(gate_up, 2 * features, dtype=dtype),
        *update_arguments(update, features, rows, dtype=dtype),
        *matrix(gradient, 2 * features, rows, dtype=dtype),
        *optional_matrix(y, features, rows, dtype=dtype),
    )
    return gradient


def swiglu_backward_adapted(
    dy: Tensor,
    gate_up: Tensor,
    dh_TR: Tensor,
    bits: Tensor | None,
    sections: Sequence[AdapterSection],
    *,
    scale: float = 1.0,
    update: InputUpdate | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Computes [dgate | dup], and dA += scale * dH^T (mask * y) of the adapters on y, which is never written.

    Args:
        dy: fp32 or bfloat16 [T, F].
        gate_up: [T, 2F] of the same dtype, forward's input.
        dh_TR: of the same dtype, gradient of the stacked H.
        bits: packed mask of y, or None.
        sections: adapters on y; those without `da` are left out.
        scale: dropout's 1 / (1 - p).
        update: the adapters' part of dy, of the same dH and mask; None where dy has it already.
        out: where the gradient goes; may be gate_up.
    """
    (rows, features), ranks, dtype = dy.shape, dh_TR.shape[1], gate_up.dtype
    gradient = torch.empty(gate_up.shape, dtype=dtype) if out is None else out
    added: tuple[int | float | None, ...] = (0, None, 0, 1.0)
    if update is not None:
        assert update.dh_TR.data_ptr() == dh_TR.data_ptr() and (update.mask is None) == (bits is None)
        added = (ranks, *matrix(update.a_RI, features, ranks, dtype=dtype), update.scale)
    library().engine_swiglu_backward_adapted(
        threads(),
        type_number(gate_up),
        rows,
        features,
        *matrix(dy, dtype=dtype),
        *matrix(gate_up, 2 * features, rows, dtype=dtype),
        *added,
        *matrix(gradient, 2 * features, rows, dtype=dtype),
        ranks,
        *matrix(dh_TR, rows=rows, dtype=dtype),
        *optional_bits(bits, features, rows),
        *sections_of_a(sections, ranks, features, scale),
    )
    return gradient


def backward_adapted(
    dy: Tensor,
    gate_up: Tensor,
    update: InputUpdate | None,
    dh_TR: Tensor,
    mask: Tensor | None,
    scale: float,
    sections: Sequence[AdapterSection],
) -> Tensor:
    """Computes the op swiglu_backward_adapted; see engine.ops.kernels.swiglu."""
    return swiglu_backward_adapted(dy, gate_up, dh_TR, mask, sections, scale=scale, update=update)
