"""The plain-torch specification of the ops that fuse what `reference` has apart; same signatures as the kernels.

Legend: T tokens, F features, V vocabulary rows held here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triton_kernels import reference


def residual_rmsnorm_forward(
    x_TF: Tensor,
    residual_TF: Tensor,
    weight_F: Tensor,
    eps: float,
    *,
    out: Tensor | None = None,
    sum_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """s = x + residual, then the norm of s: y, s, rstd. See `triton_kernels.rmsnorm`."""
    total = torch.add(x_TF, residual_TF, out=sum_out)
    y, rstd = reference.rmsnorm_forward(total, weight_F, eps)
    return (y if out is None else out.copy_(y)), total, rstd


def local_statistics(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum, sum of exp(logit - maximum) and target logit of a vocabulary shard; fp32, or fp64 for fp64 logits.

    Overwrites logits of those dtypes with exp(logits - maximum), which `local_gradient` then uses; others stay.
    """
    wide_TV = logits_TV.to(_wide(logits_TV.dtype))
    max_T = wide_TV.amax(-1)
    total_T, shifted_T = reference.cross_entropy_statistics(wide_TV, targets_T, max_T)
    here = (targets_T >= 0) & (targets_T < logits_TV.shape[1])
    return max_T, total_T, torch.where(here, shifted_T + max_T, 0.0)


def local_gradient(
    logits_TV: Tensor, targets_T: Tensor, local_max_T: Tensor, max_T: Tensor, total_T: Tensor, scale_T: Tensor
) -> Tensor:
    """(softmax - onehot) * scale, written over what `local_statistics` left of the logits."""
    if logits_TV.dtype == _wide(logits_TV.dtype):
        # the exponentials are relative to this shard's maximum
        return reference.cross_entropy_backward(logits_TV, targets_T, total_T * torch.exp(max_T - local_max_T), scale_T)
    wide_TV = logits_TV.to(torch.float32).sub_(max_T[:, None]).exp_()
    return logits_TV.copy_(reference.cross_entropy_backward(wide_TV, targets_T, total_T, scale_T))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype statistics are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
