"""The arithmetic behind the ops, by one of several backends with one signature each.

A backend is chosen once, when the model is built, and handed down; ops never ask which one they have. `reference` is
the plain-torch specification and runs everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from triton_kernels import reference
from triton_kernels.philox import dropout_mask


@dataclass(frozen=True, kw_only=True, slots=True)
class InputUpdate:
    """What adapters add to the gradient of their input: scale * mask * (dH A).

    Args:
        dh_TR: [T, R], gradient of the adapters' projection.
        a_RI: [R, I] stacked A.
        mask: the input's mask in the backend's own form; None without dropout.
        scale: 1 / (1 - p); 1 without dropout.
    """

    dh_TR: Tensor
    a_RI: Tensor
    mask: Tensor | None
    scale: float


class DrawMask(Protocol):
    """Draws which elements dropout keeps; see `triton_kernels.philox.dropout_mask`. The form is the backend's own."""

    def __call__(
        self, token_index: Tensor, *, feature_offset: int, num_features: int, probability: float, seed: int,
        site: int, step: Tensor,
    ) -> Tensor: ...  # fmt: skip


class NormForward(Protocol):
    """y = norm(x) * weight into `out`; returns 1 / rms, [T, 1]."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor: ...


class NormBackward(Protocol):
    """dx, for a gradient dy that still lacks `update`. Adds the weight's gradient to `weight_gradient` if given."""

    def __call__(
        self, dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, update: InputUpdate | None,
        weight_gradient: Tensor | None,
    ) -> Tensor: ...  # fmt: skip


class SwiGLUBackward(Protocol):
    """[dgate | dup], for a gradient dy that still lacks `update`."""

    def __call__(self, dy: Tensor, gate_up: Tensor, update: InputUpdate | None) -> Tensor: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """One backend.

    Args:
        name: as a user asks for it.
        draw_mask, norm_forward, norm_backward, swiglu_backward: see their types.
        swiglu_forward: [gate | up], out.
        project: x, stacked A, mask, keep scale, out [T, R]: drop(x) A^T.
        a_gradient: dH, x, mask, keep scale: fp32 [R, I] dH^T drop(x).
        apply_update: dx, update: dx + update, in place where dx allows it.
    """

    name: str
    draw_mask: DrawMask
    norm_forward: NormForward
    norm_backward: NormBackward
    swiglu_forward: Callable[[Tensor, Tensor], None]
    swiglu_backward: SwiGLUBackward
    project: Callable[[Tensor, Tensor, Tensor | None, float, Tensor], None]
    a_gradient: Callable[[Tensor, Tensor, Tensor | None, float], Tensor]
    apply_update: Callable[[Tensor, InputUpdate], Tensor]


def _dropped(x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return x if mask is None else (x * mask).mul_(scale)


def _apply_update(dx: Tensor, update: InputUpdate) -> Tensor:
    if update.mask is None:
        return dx.addmm_(update.dh_TR, update.a_RI, alpha=update.scale)
    return dx.addcmul_(update.dh_TR @ update.a_RI, update.mask.to(dx.dtype), value=update.scale)


def _norm_forward(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    y, rstd = reference.rmsnorm_forward(x, weight, eps)
    out.copy_(y)
    return rstd


def _norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, update: InputUpdate | None, weight_gradient: Tensor | None
) -> Tensor:
    if update is not None:
        dy = _apply_update(dy, update)
    if weight_gradient is not None:
        weight_gradient.add_(reference.rmsnorm_weight_gradient(dy, x, rstd))
    return reference.rmsnorm_backward(dy, x, weight, rstd)


def _swiglu_forward(gate_up: Tensor, out: Tensor) -> None:
    out.copy_(reference.swiglu_forward(gate_up))


def _swiglu_backward(dy: Tensor, gate_up: Tensor, update: InputUpdate | None) -> Tensor:
    return reference.swiglu_backward(dy if update is None else _apply_update(dy, update), gate_up)


def _project(x: Tensor, a_RI: Tensor, mask: Tensor | None, scale: float, out: Tensor) -> None:
    torch.mm(_dropped(x, mask, scale), a_RI.t(), out=out)


def _a_gradient(dh_TR: Tensor, x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return (dh_TR.t() @ _dropped(x, mask, scale)).to(torch.float32)


REFERENCE = Kernels(
    name="reference",
    draw_mask=dropout_mask,
    norm_forward=_norm_forward,
    norm_backward=_norm_backward,
    swiglu_forward=_swiglu_forward,
    swiglu_backward=_swiglu_backward,
    project=_project,
    a_gradient=_a_gradient,
    apply_update=_apply_update,
)
