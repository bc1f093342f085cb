"""RMSNorm of each query and key head of a fused product, and their rotation; v is left where it is.

    n = x / rms(x) * (w + offset) over the head's features,   q and k = n turned by the token's angles

One op, so that the result between norm and rotation is not kept, and backward writes one gradient of the fused product
without a concatenation. Kept are the product itself, of which v is a part, and the norms' statistics. A backend may
have kernels that do all of it in one pass (`Kernels.head_norms`); elsewhere the heads are laid out as rows for the
backend's norm and rotation, in a copy that is normalised in place.

Legend: T tokens, H query heads, K key and value heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.ops.gradients import GradientSink
from engine.ops.kernels import Kernels
from engine.ops.norm import offset_weight

Weights = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadNorms:
    """The norms of queries and of keys.

    Args:
        q_weight, k_weight: [D].
        q_sink, k_sink: of their gradients; None where frozen.
        eps: of both.
        offset: added to both weights.
    """

    q_weight: Tensor
    k_weight: Tensor
    q_sink: GradientSink | None
    k_sink: GradientSink | None
    eps: float
    offset: float = 0.0

    def weights(self) -> Weights:
        """Returns the factors: the weights with their offset."""
        return offset_weight(self.q_weight.detach(), self.offset), offset_weight(self.k_weight.detach(), self.offset)

    def leaves(self) -> tuple[Tensor, ...]:
        """Returns the weights that train."""
        pairs = ((self.q_weight, self.q_sink), (self.k_weight, self.k_sink))
        return tuple(weight for weight, sink in pairs if sink is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rotation:
    cos: Tensor
    sin: Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def heads(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns views [T, H, D], [T, K, D] and [T, K, D] of [q | k | v]."""
        q, k, v = packed.unflatten(1, (-1, self.head_dim)).split(
            [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1
        )
        return q, k, v


def _rows(x_TND: Tensor) -> Tensor:
    """Copies heads to rows [T N, D]."""
    return torch.empty(x_TND.shape, dtype=x_TND.dtype, device=x_TND.device).copy_(x_TND).flatten(0, 1)


def _forward(
    qkv: Tensor, weights: Weights, eps: float, rotation: _Rotation, kernels: Kernels
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Returns q, k and the statistics."""
    cos, sin = rotation.cos, rotation.sin
    if kernels.head_norms is not None:
        sizes = (rotation.num_heads, rotation.num_kv_heads, rotation.head_dim)
        q, k, rstd = kernels.head_norms.forward(qkv, weights, eps, cos, sin, *sizes)
        return q, k, (rstd,)
    turned, statistics = [], []
    for x, weight in zip(rotation.heads(qkv)[:2], weights, strict=True):
        rows = _rows(x)
        statistics.append(kernels.norm_forward(rows, weight, eps, rows))
        packed = rows.view(x.shape).flatten(1)
        turned.append(kernels.split_rotate(packed, cos, sin, x.shape[1], 0, x.shape[2])[0])
    return turned[0], turned[1], tuple(statistics)


def _backward(
    gradients: tuple[Tensor, Tensor, Tensor],
    qkv: Tensor,
    weights: Weights,
    statistics: tuple[Tensor, ...],
    rotation: _Rotation,
    kernels: Kernels,
    weight_gradients: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """Returns the gradient of the fused product."""
    cos, sin = rotation.cos, rotation.sin
    if kernels.head_norms is not None:
        return kernels.head_norms.backward(
            gradients, qkv, weights, statistics[0], cos, sin, weight_gradients=weight_gradients
        )
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    places = rotation.heads(dqkv)
    places[2].copy_(gradients[2])
    parts = zip(gradients, rotation.heads(qkv), places, weights, statistics, weight_gradients, strict=False)
    for dy, x, place, weight, rstd, weight_gradient in parts:
        none = dy[:, :0]
        turned = kernels.split_rotate_backward(dy, none, none, cos, sin).view(-1, x.shape[2])
        dx = kernels.norm_backward(turned, _rows(x), weight, rstd, None, weight_gradient)
        place.copy_(dx.view(x.shape))
    return dqkv


class _NormRotate(torch.autograd.Function):
    """Norm and rotation; the leaves (trainable weights) are passed only so that autograd knows the output depends on
    them."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, norms: HeadNorms, rotation: _Rotation, kernels: Kernels, *leaves: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, statistics = _forward(qkv, norms.weights(), norms.eps, rotation, kernels)
        ctx.save_for_backward(qkv, *statistics)
        ctx.norms, ctx.rotation, ctx.kernels, ctx.num_leaves = norms, rotation, kernels, len(leaves)
        return q, k, rotation.heads(qkv)[2]

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Any, ...]:
        qkv, *statistics = ctx.saved_tensors
        norms: HeadNorms = ctx.norms
        sinks = (norms.q_sink, norms.k_sink)
        buffers = tuple(None if sink is None else sink.buffer for sink in sinks)
        dqkv = _backward(
            (dq, dk, dv), qkv, norms.weights(), tuple(statistics), ctx.rotation, ctx.kernels, (buffers[0], buffers[1])
        )
        for sink in sinks:
            if sink is not None:
                sink.added()
        return (dqkv, None, None, None, *([None] * ctx.num_leaves))


def norm_rotate(
    qkv: Tensor,
    norms: HeadNorms,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    kernels: Kernels,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalises and rotates: fused product [T, (H + 2K) D] -> q [T, H, D] and k [T, K, D], and v [T, K, D], a view.

    Args:
        norms: of the heads.
        cos, sin: fp32 [T, D / 2].
    """
    rotation = _Rotation(cos=cos, sin=sin, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    return _NormRotate.apply(qkv, norms, rotation, kernels, *norms.leaves())
