"""Cross-entropy of several labels of each token, over a vocabulary that is split over the tensor-parallel ranks.

    loss_tk = log sum_v exp(z_tv) - z_t,label(t,k)
    d sum_tk g_tk loss_tk / d z_t = (sum_k g_tk) softmax(z_t) - sum_k g_tk onehot(label(t,k))

Softmax statistics are computed once a token, whatever K is. With one label the numbers of forward are those of
`engine.ops.cross_entropy`.

Legend: T tokens, K labels of each, V vocabulary rows held here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.batch import IGNORE_LABEL
from engine.distributed.collectives import all_reduce
from engine.distributed.mesh import Axis
from engine.kernels.linear_cross_entropy import combine_statistics
from engine.ops.cross_entropy import over_axis
from engine.ops.kernels import REFERENCE, Kernels


class _SeveralLabels(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        labels_KT: Tensor,
        first_id: int,
        num_ids: int,
        axis: Axis,
        kernels: Kernels,
        cap: float | None,
        temperature: float,
    ) -> Tensor:
        held = logits_TV[:, :num_ids]
        labels_TK = labels_KT.t()
        counted_TK = labels_TK != IGNORE_LABEL
        places_TK = labels_TK - first_id
        here_TK = counted_TK & (places_TK >= 0) & (places_TK < num_ids)
        places_TK = torch.where(here_TK, places_TK, 0)
        wide = torch.promote_types(logits_TV.dtype, torch.float32)
        targets_TK = torch.zeros(labels_TK.shape, dtype=wide, device=logits_TV.device)
        if num_ids:
            targets_TK = held.gather(1, places_TK).to(wide)
            if cap is not None:
                targets_TK = (targets_TK / cap).tanh_().mul_(cap / temperature)
            targets_TK = torch.where(here_TK, targets_TK, 0.0)
        slopes_TK = None if cap is None else 1.0 - (targets_TK * (temperature / cap)).square()
        none_T = torch.full_like(labels_KT[0], -1)
        local = kernels.loss.shard_statistics(held, none_T)
        whole = combine_statistics(local, **over_axis(axis))
        targets_TK = all_reduce(targets_TK, axis)
        ctx.save_for_backward(
            logits_TV, none_T, places_TK, here_TK, counted_TK, slopes_TK, local.maximum, whole.maximum, whole.total
        )
        ctx.num_ids, ctx.kernels, ctx.temperature = num_ids, kernels, 1.0 if cap is None else temperature
        losses_TK = whole.total.log()[:, None] + (whole.maximum[:, None] - targets_TK)
        return torch.where(counted_TK, losses_TK, 0.0)

    @staticmethod
    def backward(ctx: Any, dloss_TK: Tensor) -> tuple[Tensor | None, ...]:
        logits_TV, none_T, places_TK, here_TK, counted_TK, slopes_TK, local_max_T, max_T, total_T = ctx.saved_tensors
        held, padding = logits_TV[:, : ctx.num_ids], logits_TV[:, ctx.num_ids :]
        if ctx.num_ids:
            scale_TK = torch.where(counted_TK, dloss_TK, 0.0)
            ctx.kernels.loss.gradient(held, none_T, local_max_T, max_T, total_T, scale_TK.sum(1))
            if slopes_TK is not None:
                scale_TK = scale_TK * slopes_TK / ctx.temperature
            held.scatter_add_(1, places_TK, torch.where(here_TK, -scale_TK, 0.0).to(held.dtype))
        padding.zero_()
        return (logits_TV, *([None] * 7))


def several_label_losses(
    logits_TV: Tensor,
    labels_KT: Tensor,
    *,
    first_id: int,
    num_ids: int,
    axis: Axis,
    kernels: Kernels = REFERENCE,
    cap: float | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Computes -log softmax(logits)[label] for each label of each token.

    Consumes `logits` and can run backward once, as `engine.ops.cross_entropy.cross_entropy`.

    Args:
        logits_TV: [T, V], this rank's vocabulary rows, padding columns included.
        labels_KT: int64 [K, T] global ids, or IGNORE_LABEL.
        first_id, num_ids: the ids this rank holds.
        axis: the axis the vocabulary is split over.
        kernels: the backend, whose loss applies the cap.
        cap: soft cap of the logits; None where there is none.
        temperature: that the backend's loss divides capped logits by; logits without a cap are divided already.

    Returns:
        fp32 [T, K]; 0 where the label is IGNORE_LABEL. Equal on all ranks of the axis.
    """
    return _SeveralLabels.apply(logits_TV, labels_KT, first_id, num_ids, axis, kernels, cap, temperature)
