"""The compiled kernels as a backend of the ops. For fp32 and bfloat16 on the CPU; masks are packed bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.linear_cross_entropy import LossKernels
from engine.kernels.native import (
    adapted,
    attention,
    cross_entropy,
    dropout,
    generation,
    low_rank,
    norm,
    product,
    rope,
    swiglu,
)
from engine.kernels.records import AdapterSection, InputUpdate
from engine.ops import kernels


def _norm_forward(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    return norm.rmsnorm_forward(x, weight, eps, out=out)[1]


def _norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    update: InputUpdate | None,
    weight_gradient: Tensor | None,
) -> Tensor:
    return norm.rmsnorm_backward(dy, x, weight, rstd, update=update, weight_gradient=weight_gradient)


def _swiglu_forward(gate_up: Tensor, out: Tensor) -> None:
    swiglu.swiglu_forward(gate_up, out=out)


def _swiglu_backward(dy: Tensor, gate_up: Tensor, update: InputUpdate | None, y: Tensor | None = None) -> Tensor:
    return swiglu.swiglu_backward(dy, gate_up, update=update, y=y)


def _swiglu_backward_adapted(
    dy: Tensor,
    gate_up: Tensor,
    update: InputUpdate | None,
    dh_TR: Tensor,
    mask: Tensor | None,
    scale: float,
    sections: Sequence[AdapterSection],
) -> Tensor:
    return swiglu.swiglu_backward_adapted(dy, gate_up, dh_TR, mask, sections, scale=scale, update=update)


def _project(x: Tensor, a_RI: Tensor, mask: Tensor | None, scale: float, out: Tensor) -> None:
    low_rank.project(x, mask, a_RI, scale=scale, out=out)


def _a_gradient(
    dh_TR: Tensor, x: Tensor, mask: Tensor | None, scale: float, sections: Sequence[AdapterSection]
) -> None:
    low_rank.accumulate_a(dh_TR, x, mask, sections, scale=scale)


def _norm_a_gradient(
    dh_TR: Tensor,
    u: Tensor,
    rstd: Tensor,
    weight: Tensor,
    mask: Tensor | None,
    scale: float,
    sections: Sequence[AdapterSection],
) -> None:
    columns = weight.to(torch.float32)
    low_rank.accumulate_a(dh_TR, u, mask, sections, scale=scale, row_scale_T=rstd, column_scale_I=columns)


def _adapted_forward(
    x: Tensor,
    weight_OI: Tensor,
    a_RI: Tensor,
    sections: Sequence[AdapterSection],
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
    sections: Sequence[AdapterSection],
    *,
    h_TR: Tensor,
    mask: Tensor | None,
    keep_scale: float,
    updates: bool,
) -> tuple[Tensor, Tensor]:
    return adapted.backward(dy, weight_OI, a_RI, sections, h_TR=h_TR, bits=mask, keep_scale=keep_scale, updates=updates)


def _folds(num_inputs: int, num_outputs: int, dtype: torch.dtype) -> kernels.Folds:
    """Folds by measurement (BENCHMARKS.md, what adapters cost): the further columns widen the input gradient's product,
    which only a much larger output hides; below that the compiled skinny products are as fast or faster. Where one
    product takes the adapters along, nothing is to be gained."""
    pays = num_outputs >= 4 * num_inputs and not (dtype == torch.float32 and product.has_tiles())
    return kernels.Folds(forward=pays, backward=pays)


def _paged_attention(
    q_NHD: Tensor,
    keys_SKD: Tensor,
    values_SKD: Tensor,
    table_NP: Tensor,
    counts_N: Tensor,
    *,
    page: int,
    scale: float,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    assert softcap is None and sinks_H is None, "see its `lacks`"
    return generation.paged_attention(q_NHD, keys_SKD, values_SKD, table_NP, counts_N, page=page, scale=scale)


def _paged_attention_lacks(head_dim: int, capped: bool, sinks: bool) -> str | None:
    return "a soft cap on scores" if capped else "attention sinks" if sinks else None


NATIVE = kernels.Kernels(
    name="native",
    draw_mask=dropout.dropout_bits,
    norm_forward=_norm_forward,
    norm_backward=_norm_backward,
    swiglu_forward=_swiglu_forward,
    swiglu_backward=_swiglu_backward,
    project=kernels.scaled_projection(_project),
    a_gradient=_a_gradient,
    b_gradient=low_rank.accumulate_b,
    apply_update=low_rank.add_input_gradient,
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
    paged_attention=kernels.PagedAttention(attend=_paged_attention, lacks=_paged_attention_lacks),
    gumbel_argmax=generation.gumbel_argmax,
)
