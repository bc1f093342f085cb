"""The fused product of queries, keys and values, [T, (H + 2K) D], as heads.

split_rotate(qkv, cos, sin, num_heads, num_kv_heads, head_dim) -> rotated q [T, H, D], rotated k [T, K, D], v [T, K, D].

split_rotate_backward(dq, dk, dv, cos, sin) -> the gradient of the fused product.

head_norms: RMSNorm of each query and key head and their rotation in one pass, a `HeadNormKernels`; None where
norm_forward and split_rotate, one after the other, are all there is. See `engine.ops.head_norm`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.native import rope
from engine.ops.kernels.op import Op, like, wide


def _split_rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    q_in, k_in, v_in = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    q = torch.empty(q_in.shape, dtype=qkv.dtype, device=qkv.device)
    k = torch.empty(k_in.shape, dtype=qkv.dtype, device=qkv.device)
    reference.rope_rotate(q_in, cos, sin, q)
    reference.rope_rotate(k_in, cos, sin, k)
    return q, k, v_in.contiguous()


def _split_shape(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (qkv.new_empty(qkv.shape[0], heads, head_dim) for heads in (num_heads, num_kv_heads, num_kv_heads))
    return q, k, v


SPLIT_ROTATE = Op(
    reference=_split_rotate,
    native=rope.split_rotate,
    triton="engine.kernels.triton.ops:split_rotate",
    shape=_split_shape,
)


def _split_rotate_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    tokens, num_heads, head_dim = dq.shape
    num_kv_heads = dk.shape[1]
    out = dq.new_empty(tokens, num_heads + 2 * num_kv_heads, head_dim)
    dq_out, dk_out, dv_out = out.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    reference.rope_rotate(dq, cos, sin, dq_out, inverse=True)
    reference.rope_rotate(dk, cos, sin, dk_out, inverse=True)
    dv_out.copy_(dv)
    return out.flatten(1)


SPLIT_ROTATE_BACKWARD = Op(
    reference=_split_rotate_backward,
    native=rope.split_rotate_backward,
    triton="engine.kernels.triton.ops:split_rotate_backward",
    shape=lambda dq, dk, dv, *_: dq.new_empty(dq.shape[0], (dq.shape[1] + 2 * dk.shape[1]) * dq.shape[2]),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadNormKernels:
    """Both directions of `head_norms`.

    Args:
        forward: (qkv, weights, eps, cos, sin, num_heads, num_kv_heads, head_dim) -> normalised and rotated q [T, H, D]
            and k [T, K, D], and their statistics; `weights` are the two norms'.
        backward: ((dq, dk, dv), qkv, weights, statistics, cos, sin, *, weight_gradients) -> the gradient of the fused
            product. Adds the weights' gradients where given.
    """

    forward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    backward: Callable[..., Tensor]


def _norm_shape(
    qkv: Tensor, weights: Any, eps: float, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    q, k = (qkv.new_empty(qkv.shape[0], heads, head_dim) for heads in (num_heads, num_kv_heads))
    return q, k, wide(qkv, (qkv.shape[0], num_heads + num_kv_heads))


HEAD_NORMS = Op(
    triton=HeadNormKernels(
        forward="engine.kernels.triton.head_norm:norm_rope_split",  # type: ignore[arg-type]  # resolved late
        backward="engine.kernels.triton.head_norm:norm_rope_merge",  # type: ignore[arg-type]
    ),
    shape=HeadNormKernels(forward=_norm_shape, backward=lambda gradients, qkv, *_, **__: like(qkv)),
)
