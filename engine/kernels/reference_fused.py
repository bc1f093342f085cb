"""The plain-torch specification of the fused ops, whose parts `reference` has separately.

Legend: T tokens, F features, V vocabulary rows held here, O output features, R rows of the stacked A.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.records import AdapterSection


def output_gradients(
    dy_TO: Tensor,
    h_TR: Tensor | None,
    sections: Sequence[AdapterSection],
    *,
    dh_out: Tensor | None = None,
    add: bool = False,
) -> None:
    """Computes dH = s dY B into `dh_out` [T, R], and dB = dY^T H into the sections' `db` or added to them."""
    for one in sections:
        dy = one.columns(dy_TO)
        if dh_out is not None:
            assert one.b is not None, "dH needs B"
            dh = one.ranks(dh_out)
            torch.mm(dy, one.b, out=dh)
            dh.mul_(one.scale)
        if one.db is None:
            continue
        assert h_TR is not None, "dB needs H"
        h = one.ranks(h_TR)
        if dy.dtype == one.db.dtype:
            one.db.addmm_(dy.t(), h, beta=1.0 if add else 0.0)
        elif add:
            one.db.add_(dy.t() @ h)
        else:
            one.db.copy_(dy.t() @ h)


def local_statistics(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Computes maximum, sum of exp(logit - maximum) and target logit of a vocabulary shard; fp32, or fp64 for fp64
    logits.

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
    """Computes (softmax - onehot) * scale, written over the result of `local_statistics`."""
    if logits_TV.dtype == _wide(logits_TV.dtype):
        # the exponentials are relative to this shard's maximum
        return reference.cross_entropy_backward(logits_TV, targets_T, total_T * torch.exp(max_T - local_max_T), scale_T)
    wide_TV = logits_TV.to(torch.float32).sub_(max_T[:, None]).exp_()
    return logits_TV.copy_(reference.cross_entropy_backward(wide_TV, targets_T, total_T, scale_T))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that statistics are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
