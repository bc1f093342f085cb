"""RMSNorm of queries and keys over all their heads, which lie on several tensor-parallel ranks.

    r = 1 / sqrt(sum over all heads of x^2 / W + eps),   y = r x w
    dx = r (g - x r^2 S / W),   g = dy w,   S = sum over all heads of g . x

Both sums cross the ranks, those of queries and of keys in one collective each way. Where a key head lies on several
ranks (copies), it is counted once in forward; in backward each copy has its own part of dy, and the copies' gradients
are summed later, so each takes its part of the second term.

Legend: T tokens, F features held here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.distributed.collectives import all_reduce
from engine.distributed.mesh import Axis
from engine.ops.gradients import GradientSink


@dataclass(frozen=True, kw_only=True, slots=True)
class WideNorm:
    """The norm of queries, or that of keys, on this rank.

    Args:
        weight_F: of the features held here.
        sink: of its gradient; None where it is frozen.
        width: features on all ranks, each once.
        copies: ranks that hold the same features.
    """

    weight_F: Tensor
    sink: GradientSink | None
    width: int
    copies: int


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _WideNorms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, norms: tuple[WideNorm, WideNorm], eps: float, axis: Axis, *leaves: Tensor
    ) -> tuple[Tensor, Tensor]:
        squares = [_wide(x).square().sum(-1) / norm.copies for x, norm in zip((q, k), norms, strict=True)]
        totals = all_reduce(torch.stack(squares), axis)
        rstd = [torch.rsqrt(total / norm.width + eps)[:, None] for total, norm in zip(totals, norms, strict=True)]
        ctx.save_for_backward(q, k, *rstd)
        ctx.norms, ctx.axis, ctx.num_leaves = norms, axis, len(leaves)
        scaled = ((_wide(x) * r, norm) for x, r, norm in zip((q, k), rstd, norms, strict=True))
        y_q, y_k = (y.mul_(norm.weight_F).to(q.dtype) for y, norm in scaled)
        return y_q, y_k

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Any, ...]:
        q, k, *rstd = ctx.saved_tensors
        parts = list(zip((dq, dk), (q, k), rstd, ctx.norms, strict=True))
        for dy, x, r, norm in parts:
            if norm.sink is not None:
                norm.sink.add((_wide(dy) * _wide(x) * r).sum(0))
        gradients = [_wide(dy) * norm.weight_F for dy, _, _, norm in parts]
        shares = torch.stack([(g * _wide(x)).sum(-1) for g, (_, x, _, _) in zip(gradients, parts, strict=True)])
        shares = all_reduce(shares, ctx.axis)
        results = []
        for g, share, (_, x, r, norm) in zip(gradients, shares, parts, strict=True):
            factor = r.square() * share[:, None] / (norm.width * norm.copies)
            results.append(g.addcmul_(_wide(x), factor, value=-1).mul_(r).to(x.dtype))
        return (*results, None, None, None, *([None] * ctx.num_leaves))


def wide_norms(
    q_TF: Tensor, k_TF: Tensor, norms: tuple[WideNorm, WideNorm], *, eps: float, axis: Axis, leaves: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """Normalises queries [T, F] and keys [T, F] of this rank's heads, each over the heads of all ranks of `axis`.

    Args:
        norms: of queries and of keys.
        leaves: the weights among theirs that require a gradient.
    """
    return _WideNorms.apply(q_TF, k_TF, norms, eps, axis, *leaves)
