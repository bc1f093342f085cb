"""Cross-entropy over a vocabulary that is split over the tensor-parallel ranks.

No rank ever sees all logits of a token: the maximum, the sum of exponentials and the target's logit cross the ranks
(three numbers a token), the rest stays.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.batch import IGNORE_LABEL
from engine.distributed.collectives import all_reduce
from engine.distributed.mesh import Axis
from engine.kernels.linear_cross_entropy import Combine, combine_statistics
from engine.ops.kernels import REFERENCE, Kernels


def over_axis(axis: Axis) -> dict[str, Combine | None]:
    """Returns the reductions that combine maxima and sums of the shards on `axis`."""
    if axis.size == 1:
        return {"combine_max": None, "combine_sum": None}
    return {
        "combine_max": lambda maxima: all_reduce(maxima, axis, dist.ReduceOp.MAX),
        "combine_sum": lambda sums: all_reduce(sums, axis),
    }


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        labels_T: Tensor,
        first_id: int,
        num_ids: int,
        axis: Axis,
        kernels: Kernels,
        entropies_T: Tensor | None,
        differentiable: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        targets_T = labels_T - first_id
        targets_T = torch.where((targets_T >= 0) & (targets_T < num_ids), targets_T, -1)
        kept_TV = logits_TV[:, :num_ids].clone() if differentiable else None
        with_moment = entropies_T is not None or differentiable
        local = kernels.loss.shard_statistics(logits_TV[:, :num_ids], targets_T, with_moment=with_moment)
        whole = combine_statistics(local, **over_axis(axis))
        if entropies_T is not None:
            entropies_T.copy_(whole.entropies())
        counted_T = labels_T != IGNORE_LABEL
        found_T = whole.entropies() if differentiable else None
        ctx.save_for_backward(
            logits_TV, targets_T, local.maximum, whole.maximum, whole.total, counted_T, kept_TV, found_T
        )
        ctx.num_ids, ctx.kernels = num_ids, kernels
        losses_T = torch.where(counted_T, whole.losses(), 0.0)
        return losses_T if found_T is None else (losses_T, found_T)

    @staticmethod
    def backward(ctx: Any, dloss_T: Tensor, dentropy_T: Tensor | None = None) -> tuple[Tensor | None, ...]:
        logits_TV, targets_T, local_max_T, max_T, total_T, counted_T, kept_TV, entropies_T = ctx.saved_tensors
        scale_T = torch.where(counted_T, dloss_T, 0.0)
        held, padding = logits_TV[:, : ctx.num_ids], logits_TV[:, ctx.num_ids :]
        if ctx.num_ids:
            ctx.kernels.loss.gradient(held, targets_T, local_max_T, max_T, total_T, scale_T)
            if kept_TV is not None and dentropy_T is not None:
                held += ctx.kernels.loss.entropy_gradient(kept_TV, max_T, total_T, entropies_T, dentropy_T)
        padding.zero_()
        return (logits_TV, *[None] * 7)


def cross_entropy(
    logits_TV: Tensor,
    labels_T: Tensor,
    *,
    first_id: int,
    num_ids: int,
    axis: Axis,
    kernels: Kernels = REFERENCE,
    entropies_T: Tensor | None = None,
) -> Tensor:
    """Computes -log softmax(logits)[label] for each token.

    Consumes `logits` (they are overwritten; that is the memory of one copy saved) and can run backward once.

    Args:
        logits_TV: [T, V], this rank's vocabulary rows, padding columns included.
        labels_T: int64 global ids, or IGNORE_LABEL.
        first_id, num_ids: the ids this rank holds.
        axis: the axis the vocabulary is split over.
        kernels: the backend.
        entropies_T: fp32 [T] that the entropies of all tokens' distributions are written to, without gradient; None
            where they are not asked for.

    Returns:
        fp32 [T]; 0 where the label is IGNORE_LABEL. Equal on all ranks of the axis.
    """
    losses_T: Tensor = _CrossEntropy.apply(logits_TV, labels_T, first_id, num_ids, axis, kernels, entropies_T, False)
    return losses_T


def losses_and_entropies(
    logits_TV: Tensor, labels_T: Tensor, *, first_id: int, num_ids: int, axis: Axis, kernels: Kernels = REFERENCE
) -> tuple[Tensor, Tensor]:
    """Computes the losses as `cross_entropy` does, and the entropies of the distributions, both differentiable. Keeps a
    second copy of the logits until backward.

    Returns:
        fp32 [T] of each.
    """
    found: tuple[Tensor, Tensor] = _CrossEntropy.apply(
        logits_TV, labels_T, first_id, num_ids, axis, kernels, None, True
    )
    return found
