"""The ops of `engine.ops.kernels` by these kernels, where a launcher has other arguments than its op."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.records import AdapterPlace, AdapterSection, InputUpdate
from engine.kernels.reference import scale_projection
from engine.kernels.triton import cross_entropy, lora, output_gradients, paged_attention, rmsnorm, rope, swiglu
from engine.kernels.triton.launch import rows_of


def norm_forward(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    added: Tensor | None = None,
    total: Tensor | None = None,
) -> Tensor:
    """Computes y into `out`; returns the statistics."""
    return rmsnorm.rmsnorm_forward(x, weight, eps, out=out, added_TF=added, total=total)[1]


def norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    update: InputUpdate | None,
    weight_gradient: Tensor | None,
    residual: Tensor | None = None,
) -> Tensor:
    """Computes dx; an update without H, which the kernel cannot fuse, is added to dy first, in place."""
    if update is not None and update.h_TR is None:
        dy, update = apply_update(dy, update), None
    return rmsnorm.rmsnorm_backward(
        dy, x, weight, rstd, update=update, weight_gradient_F=weight_gradient, residual_TF=residual
    )


def _split_scale(adapters: Sequence[AdapterPlace]) -> tuple[float, Sequence[AdapterPlace]]:
    """Returns the factor that a kernel multiplies H by, and the adapters whose scale is still missing then."""
    scales = {adapter.scale for adapter in adapters}
    return (scales.pop(), ()) if len(scales) == 1 else (1.0, adapters)


def project(
    x: Tensor,
    a_RI: Tensor,
    mask: Tensor | None,
    keep_scale: float,
    adapters: Sequence[AdapterPlace],
    out: Tensor,
    copy: Tensor | None = None,
) -> None:
    """Computes H into `out`."""
    common, own = _split_scale(adapters)
    h_TR = lora.project(x, a_RI, mask, keep_scale=keep_scale * common, out=out, copy=copy)
    scale_projection(h_TR, own)


def swiglu_project(
    gate_up: Tensor,
    out: Tensor,
    a_RI: Tensor,
    mask: Tensor | None,
    keep_scale: float,
    adapters: Sequence[AdapterPlace],
    h_out: Tensor,
) -> None:
    """Computes SwiGLU into `out` and H into `h_out`."""
    common, own = _split_scale(adapters)
    h_TR = swiglu.swiglu_project(gate_up, a_RI, mask, keep_scale=keep_scale * common, out=out, h_out=h_out)
    scale_projection(h_TR, own)


def swiglu_backward_adapted(
    dy: Tensor,
    gate_up: Tensor,
    update: InputUpdate | None,
    dh_TR: Tensor,
    mask: Tensor | None,
    scale: float,
    sections: Sequence[AdapterSection],
) -> Tensor:
    """Computes [dgate | dup] and dA."""
    return swiglu.swiglu_backward_adapted(dy, gate_up, dh_TR, mask, sections, keep_scale=scale, update=update)


def a_gradient(dh_TR: Tensor, x: Tensor, mask: Tensor | None, scale: float, sections: Sequence[AdapterSection]) -> None:
    """Adds dA."""
    lora.a_gradients(dh_TR, x, mask, sections, keep_scale=scale)


def norm_a_gradient(
    dh_TR: Tensor,
    u: Tensor,
    rstd: Tensor,
    weight: Tensor,
    mask: Tensor | None,
    scale: float,
    sections: Sequence[AdapterSection],
) -> None:
    """Adds dA, from the norm's input."""
    lora.a_gradients(dh_TR, u, mask, sections, keep_scale=scale, norm=(rstd, weight))


def b_gradient(dy_TO: Tensor, h_TR: Tensor, sections: Sequence[AdapterSection]) -> None:
    """Adds dB."""
    trained = [one for one in sections if one.db is not None]
    if trained:
        output_gradients.output_gradients(dy_TO, h_TR, trained, add=True)


def add_output_gradients(dy_TO: Tensor, h_TR: Tensor, sections: Sequence[AdapterSection], *, dh_out: Tensor) -> None:
    """Computes dH and adds dB."""
    output_gradients.output_gradients(dy_TO, h_TR, sections, dh_out=dh_out, add=True)


def apply_update(dx: Tensor, update: InputUpdate) -> Tensor:
    """Adds an update; into a dense tensor where rows of dx have gaps, because attention's backward copies such."""
    rows = rows_of(dx)
    out = rows if rows.is_contiguous() else torch.empty(rows.shape, dtype=dx.dtype, device=dx.device)
    return lora.add_input_gradient(rows, update, out=out)


def split_rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes q, k and v."""
    return rope.rope_split(rows_of(qkv), cos.contiguous(), sin.contiguous(), num_heads, num_kv_heads, head_dim)


def split_rotate_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Computes the gradient of the fused product."""
    return rope.rope_merge(dq, dk, dv, cos.contiguous(), sin.contiguous())


def loss_statistics(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the statistics of a shard."""
    return cross_entropy.local_statistics(logits_TV, targets_T.contiguous())


def paged_attention_lacks(head_dim: int, capped: bool, sinks: bool) -> str | None:
    """Returns the feature that the kernel does not compute, in words."""
    largest = paged_attention.LARGEST_HEAD
    return None if head_dim <= largest else f"heads of {head_dim} features, more than {largest}"
