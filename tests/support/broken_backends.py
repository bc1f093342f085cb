"""Backends that leave something out of their adapters' gradients, for tests that have to notice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from engine.kernels.records import AdapterSection, InputUpdate
from engine.ops.kernels import Kernels


def without_da(kernels: Kernels) -> Kernels:
    return replace(kernels, a_gradient=lambda *_: None, norm_a_gradient=kernels.norm_a_gradient and (lambda *_: None))


def without_db(kernels: Kernels) -> Kernels:
    def dh_alone(dy_TO: Tensor, h_TR: Tensor, sections: Sequence[AdapterSection], *, dh_out: Tensor) -> None:
        assert kernels.output_gradients is not None
        kernels.output_gradients(dy_TO, h_TR, [replace(one, db=None) for one in sections], dh_out=dh_out)

    return replace(kernels, b_gradient=lambda *_: None, output_gradients=dh_alone)


def without_the_mask_in_da(kernels: Kernels) -> Kernels:
    """Its expectation is the same, since the scale is forgotten too."""

    def from_a_norms_input(
        dh: Tensor, u: Tensor, rstd: Tensor, weight: Tensor, mask: Any, scale: float, to: Any
    ) -> None:
        assert kernels.norm_a_gradient is not None
        kernels.norm_a_gradient(dh, u, rstd, weight, None, 1.0, to)

    return replace(
        kernels,
        a_gradient=lambda dh, x, mask, scale, to: kernels.a_gradient(dh, x, None, 1.0, to),
        norm_a_gradient=kernels.norm_a_gradient and from_a_norms_input,
    )


def without_the_update_in_norms(kernels: Kernels) -> Kernels:
    def norm_backward(
        dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, update: Any, gradient: Any, residual: Any = None
    ) -> Tensor:
        return kernels.norm_backward(dy, x, weight, rstd, None, gradient, residual)

    return replace(kernels, norm_backward=norm_backward)


def without_the_update_in_swiglu(kernels: Kernels) -> Kernels:
    def swiglu_backward(dy: Tensor, gate_up: Tensor, update: InputUpdate | None, y: Tensor | None = None) -> Tensor:
        return kernels.swiglu_backward(dy, gate_up, None, y)

    def adapted(dy: Tensor, gate_up: Tensor, update: Any, dh: Tensor, mask: Any, scale: float, to: Any) -> Tensor:
        assert kernels.swiglu_backward_adapted is not None
        return kernels.swiglu_backward_adapted(dy, gate_up, None, dh, mask, scale, to)

    return replace(
        kernels,
        swiglu_backward=swiglu_backward,
        swiglu_backward_adapted=kernels.swiglu_backward_adapted and adapted,
    )


def without_the_update_in_o_proj(kernels: Kernels) -> Kernels:
    return replace(kernels, apply_update=lambda dx, update: dx)


BROKEN: dict[str, Callable[[Kernels], Kernels]] = {
    "dA is never added": without_da,
    "dB is never added": without_db,
    "no mask in dA": without_the_mask_in_da,
    "no update in norms": without_the_update_in_norms,
    "no update in SwiGLU": without_the_update_in_swiglu,
    "no update in o_proj": without_the_update_in_o_proj,
}
