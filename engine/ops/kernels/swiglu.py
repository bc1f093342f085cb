"""SwiGLU, y = silu(gate) * up, of [gate | up] side by side, [T, 2F].

swiglu_forward(gate_up, out): y into `out` [T, F].

swiglu_backward(dy, gate_up, update, y) -> [dgate | dup], for a gradient dy that still lacks `update`, an `InputUpdate`
or None. Writes forward's output again to `y` if given.

swiglu_project(gate_up, out, a_RI, mask, keep_scale, adapters, h_out): y into `out` and H of the adapters on it into
`h_out`, from one read of [gate | up]; see `project` in `low_rank`. None where they are two ops.

swiglu_backward_adapted(dy, gate_up, update, dh_TR, mask, scale, sections) -> [dgate | dup]: backward, and dA =
dH^T drop(y) into the sections' `da`, without writing y. None where they are two ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.native import swiglu
from engine.kernels.records import AdapterSection, InputUpdate
from engine.ops.kernels.op import Op, like, wide, write_in_place
from engine.ops.kernels.tiles import num_splits

_MOST_RANKS, _MOST_RANKS_FP32 = 64, 16
"""Ranks of an adapter on SwiGLU's output up to which `engine.kernels.triton.swiglu` makes its H along with the output,
and its dA without it."""
_TOKENS_AT_ONCE, _TOKENS_AT_ONCE_FP32 = 1024, 512
"""Tokens of which it then writes a partial sum of dA."""


def _forward(gate_up: Tensor, out: Tensor) -> None:
    out.copy_(reference.swiglu_forward(gate_up))


SWIGLU_FORWARD = Op(
    reference=_forward,
    native=swiglu.swiglu_forward,
    triton="engine.kernels.triton.swiglu:swiglu_forward",
    shape=write_in_place,
)


def _backward(dy: Tensor, gate_up: Tensor, update: InputUpdate | None, y: Tensor | None = None) -> Tensor:
    if y is not None:
        _forward(gate_up, y)
    return reference.swiglu_backward(dy if update is None else reference.apply_update(dy, update), gate_up)


SWIGLU_BACKWARD = Op(
    reference=_backward,
    native=swiglu.swiglu_backward,
    triton="engine.kernels.triton.swiglu:swiglu_backward",
    shape=lambda dy, gate_up, *_: like(gate_up),
)


def _project_shape(gate_up: Tensor, out: Tensor, a_RI: Tensor, *_: Any) -> None:
    """Allocates the partial sums of H, from tiles of tokens and features of one size."""
    tile = 32 if out.dtype == torch.float32 else 64
    if (splits := num_splits(-(-out.shape[0] // tile), out.shape[1], tile)) > 1:
        wide(out, (splits, out.shape[0], a_RI.shape[0]))


SWIGLU_PROJECT = Op(
    triton="engine.kernels.triton.ops:swiglu_project",
    shape=_project_shape,
    flops=lambda gate_up, out, a_RI, *_, **__: 2.0 * out.shape[0] * a_RI.numel(),
)


def _backward_adapted_shape(
    dy: Tensor,
    gate_up: Tensor,
    update: Any,
    dh_TR: Tensor,
    mask: Any,
    scale: float,
    sections: Sequence[AdapterSection],
) -> Tensor:
    """Allocates the partial sums of dA."""
    gradient, is_wide = like(gate_up), gate_up.dtype == torch.float32
    parts = -(-dy.shape[0] // (_TOKENS_AT_ONCE_FP32 if is_wide else _TOKENS_AT_ONCE))
    _partials = wide(dy, (parts, dh_TR.shape[1], dy.shape[1]))
    return gradient


SWIGLU_BACKWARD_ADAPTED = Op(
    native=swiglu.backward_adapted,
    triton="engine.kernels.triton.ops:swiglu_backward_adapted",
    shape=lambda dy, gate_up, *_: like(gate_up),
    triton_shape=_backward_adapted_shape,
    flops=lambda dy, gate_up, update, dh_TR, *_, **__: 2.0 * dh_TR.numel() * dy.shape[1],
)


def takes_ranks(x: Tensor, num_ranks: int) -> bool:
    """Returns whether one Triton kernel computes SwiGLU and adapters of so many ranks on its output."""
    return num_ranks <= (_MOST_RANKS_FP32 if x.dtype == torch.float32 else _MOST_RANKS)


def projected_in_two(
    forward: Callable[..., None], project: Callable[..., None], fused: Callable[..., None]
) -> Callable[..., None]:
    """Returns `swiglu_project` as the Triton backend computes it: by two kernels for many ranks."""

    def swiglu_project(gate_up: Tensor, out: Tensor, a_RI: Tensor, *others: Any) -> None:
        if takes_ranks(out, a_RI.shape[0]):
            fused(gate_up, out, a_RI, *others)
        else:
            forward(gate_up, out)
            project(out, a_RI, *others)

    return swiglu_project


def adapted_in_two(
    backward: Callable[..., Tensor], a_gradient: Callable[..., None], fused: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Returns `swiglu_backward_adapted` as the Triton backend computes it: by two kernels for many ranks."""

    def swiglu_backward_adapted(
        dy: Tensor,
        gate_up: Tensor,
        update: InputUpdate | None,
        dh_TR: Tensor,
        mask: Tensor | None,
        scale: float,
        sections: Sequence[AdapterSection],
    ) -> Tensor:
        trains = any(one.da is not None for one in sections)
        if takes_ranks(dy, dh_TR.shape[1]) and trains:
            return fused(dy, gate_up, update, dh_TR, mask, scale, sections)
        y = like(dy) if trains else None
        gradient = backward(dy, gate_up, update, y)
        if y is not None:
            a_gradient(dh_TR, y, mask, scale, sections)
        return gradient

    return swiglu_backward_adapted
