"""The compiled kernels as a backend of the ops. For fp32 and bfloat16 on the CPU; masks are packed bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.ops import kernels
from engine.ops.native import (
    adapted,
    arguments,
    attention,
    cross_entropy,
    dropout,
    low_rank,
    norm,
    product,
    rope,
    swiglu,
)
from triton_kernels.linear_cross_entropy import LossKernels
from triton_kernels.reference_fused import OutputSection


def _update(update: kernels.InputUpdate | None) -> arguments.InputUpdate | None:
    if update is None:
        return None
    return arguments.InputUpdate(dh_TR=update.dh_TR, a_RI=update.a_RI, bits=update.mask, scale=update.scale)


def _norm_forward(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    return norm.rmsnorm_forward(x, weight, eps, out=out)[1]


def _norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    update: kernels.InputUpdate | None,
    weight_gradient: Tensor | None,
) -> Tensor:
    return norm.rmsnorm_backward(dy, x, weight, rstd, update=_update(update), weight_gradient=weight_gradient)


def _swiglu_forward(gate_up: Tensor, out: Tensor) -> None:
    swiglu.swiglu_forward(gate_up, out=out)


def _swiglu_backward(
    dy: Tensor, gate_up: Tensor, update: kernels.InputUpdate | None, y: Tensor | None = None
) -> Tensor:
    return swiglu.swiglu_backward(dy, gate_up, update=_update(update), y=y)


def _swiglu_backward_adapted(
    dy: Tensor,
    gate_up: Tensor,
    update: kernels.InputUpdate | None,
    dh_TR: Tensor,
    mask: Tensor | None,
    scale: float,
    gradients: Sequence[tuple[int, Tensor]],
) -> Tensor:
    sections = _sections_of_a(gradients, scale)
    return swiglu.swiglu_backward_adapted(dy, gate_up, dh_TR, mask, sections, update=_update(update))


def _project(x: Tensor, a_RI: Tensor, mask: Tensor | None, scale: float, out: Tensor) -> None:
    low_rank.project(x, mask, a_RI, scale=scale, out=out)


def _a_gradient(
    dh_TR: Tensor, x: Tensor, mask: Tensor | None, scale: float, gradients: Sequence[tuple[int, Tensor]]
) -> None:
    low_rank.accumulate_a(dh_TR, x, mask, _sections_of_a(gradients, scale))


def _sections_of_a(gradients: Sequence[tuple[int, Tensor]], scale: float) -> list[low_rank.GradientA]:
    return [low_rank.GradientA(gradient_rI=buffer, first_row=first, scale=scale) for first, buffer in gradients]


def _norm_a_gradient(
    dh_TR: Tensor,
    u: Tensor,
    rstd: Tensor,
    weight: Tensor,
    mask: Tensor | None,
    scale: float,
    gradients: Sequence[tuple[int, Tensor]],
) -> None:
    sections, columns = _sections_of_a(gradients, scale), weight.to(torch.float32)
    low_rank.accumulate_a(dh_TR, u, mask, sections, row_scale_T=rstd, column_scale_I=columns)


def _b_gradient(dy_TO: Tensor, h_TR: Tensor, gradients: Sequence[tuple[int, int, Tensor]]) -> None:
    sections = [
        low_rank.GradientB(gradient_or=buffer, first_column=column, first_row=row, scale=1.0)
        for column, row, buffer in gradients
    ]
    low_rank.accumulate_b(dy_TO, h_TR, sections)


def _apply_update(dx: Tensor, update: kernels.InputUpdate) -> Tensor:
    native = _update(update)
    assert native is not None
    return low_rank.add_input_gradient(dx, native)


def _adapted_forward(
    x: Tensor,
    weight_OI: Tensor,
    a_RI: Tensor,
    sections: Sequence[OutputSection],
    *,
    mask: Tensor | None,
    keep_scale: float,
    h_TR: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return adapted.forward(x, weight_OI, a_RI, sections, bits=mask, keep_scale=keep_scale, h_TR=h_TR)


def _adapted_backward(
    dy: Tensor,
    weight_OI: Tensor,
    a_RI: Tensor,
    sections: Sequence[OutputSection],
    *,
    h_TR: Tensor,
    mask: Tensor | None,
    keep_scale: float,
    updates: bool,
) -> tuple[Tensor, Tensor]:
    return adapted.backward(dy, weight_OI, a_RI, sections, h_TR=h_TR, bits=mask, keep_scale=keep_scale, updates=updates)


def _folds(num_inputs: int, num_outputs: int, dtype: torch.dtype) -> bool:
    """By measurement (BENCHMARKS.md, what adapters cost): the further columns widen the input gradient's product, which
    only a much larger output hides; below that the compiled skinny products are as fast or faster. Where one product
    takes the adapters along, nothing is to be gained."""
    return num_outputs >= 4 * num_inputs and not (dtype == torch.float32 and product.has_tiles())


NATIVE = kernels.Kernels(
    name="native",
    draw_mask=dropout.dropout_bits,
    norm_forward=_norm_forward,
    norm_backward=_norm_backward,
    swiglu_forward=_swiglu_forward,
    swiglu_backward=_swiglu_backward,
    project=_project,
    a_gradient=_a_gradient,
    b_gradient=_b_gradient,
    apply_update=_apply_update,
    split_rotate=rope.split_rotate,
    split_rotate_backward=rope.split_rotate_backward,
    attention=attention.attention_by_document,
    loss=LossKernels(
        statistics=cross_entropy.local_statistics, gradient=cross_entropy.local_gradient, product=product.product
    ),
    product=product.product,
    folds=_folds,
    adapted=kernels.AdaptedProducts(fits=product.fits_tiles, forward=_adapted_forward, backward=_adapted_backward),
    norm_a_gradient=_norm_a_gradient,
    swiglu_backward_adapted=_swiglu_backward_adapted,
)
