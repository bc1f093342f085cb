"""The norm of groups of features that are gated before it, or behind it, where a group may lie on several tensor ranks.

With g = y silu(z), r = 1 / sqrt(sum of g^2 over the group / F + eps):    out = r g w
With the gate behind the norm, g = y and:                                 out = r g w silu(z)

    dg = r (e - g r^2 E / F),   e = dout w (silu(z)),   E = sum of g e over the group

Both sums cross the ranks of a group that lies on several. Arithmetic is fp32; only y and z are kept.

Legend: T tokens, W features of this rank, M groups of this rank, F features of a group on all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from engine.distributed.collectives import all_reduce
from engine.distributed.mesh import Axis
from engine.layers.module import ShardEntry
from engine.ops.gradients import GradientSink


class _GroupedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        z: Tensor,
        weight: Tensor,
        sink: GradientSink | None,
        groups: int,
        eps: float,
        gates_first: bool,
        axis: Axis,
    ) -> Tensor:
        ctx.save_for_backward(y, z, weight)
        ctx.sink, ctx.groups, ctx.eps, ctx.gates_first, ctx.axis = sink, groups, eps, gates_first, axis
        gated, rstd, _ = _normalised(ctx, y, z)
        out = (gated * rstd).flatten(1).mul_(weight)
        if not gates_first:
            out = out * silu(z.to(out.dtype))
        return out.to(y.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        y, z, weight = ctx.saved_tensors
        gated, rstd, gate = _normalised(ctx, y, z)
        dy = dy.to(gated.dtype)
        normed = (gated * rstd).flatten(1)
        behind = dy if ctx.gates_first else dy * gate
        if ctx.sink is not None:
            ctx.sink.add((behind * normed).sum(0))
        e = (behind * weight).unflatten(1, (ctx.groups, -1))
        shares = (e * gated).sum(-1, keepdim=True)
        if ctx.axis.size > 1:
            shares = all_reduce(shares, ctx.axis)
        width = gated.shape[-1] * ctx.axis.size
        d_gated = (e - gated * (rstd.square() * shares / width)).mul_(rstd).flatten(1)
        if ctx.gates_first:
            d_y, d_gate = d_gated * gate, d_gated * y.to(dy.dtype)
        else:
            d_y, d_gate = d_gated, dy * normed * weight
        wide_z = z.to(dy.dtype)
        sigmoid = wide_z.sigmoid()
        d_z = d_gate * sigmoid * (1 + wide_z * (1 - sigmoid))
        return d_y.to(y.dtype), d_z.to(z.dtype), None, None, None, None, None, None


def _normalised(ctx: Any, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns g [T, M, F], r [T, M, 1] and silu(z) [T, W]."""
    wide = torch.promote_types(y.dtype, torch.float32)
    gate, gated = silu(z.to(wide)), y.to(wide)
    if ctx.gates_first:
        gated = gated * gate
    gated = gated.unflatten(1, (ctx.groups, -1))
    squares = gated.square().sum(-1, keepdim=True)
    if ctx.axis.size > 1:
        squares = all_reduce(squares, ctx.axis)
    return gated, torch.rsqrt(squares / (gated.shape[-1] * ctx.axis.size) + ctx.eps), gate


def grouped_norm(
    y_TW: Tensor, z_TW: Tensor, weight: ShardEntry, *, groups: int, eps: float, gates_first: bool, axis: Axis
) -> Tensor:
    """Returns [T, W], normalised group by group and gated by silu(z).

    Args:
        z_TW: may be columns of a wider tensor.
        weight: [W].
        groups: of this rank.
        gates_first: whether the gate comes before the norm.
        axis: the ranks on which each group lies.
    """
    out: Tensor = _GroupedNorm.apply(
        y_TW, z_TW, weight.parameter, weight.sink, groups, eps, gates_first, axis
    )  # fmt: skip
    return out
