"""Cross-entropy over a vocabulary that is split over the tensor-parallel ranks.

No rank ever sees all logits of a token: the maximum, the sum of exponentials and the target's logit cross the ranks
(three numbers a token), the rest stays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from engine.batch import IGNORE_LABEL
from engine.distributed.collectives import all_reduce
from engine.distributed.mesh import Axis
from engine.ops.kernels import REFERENCE, Kernels


class ShardLosses(NamedTuple):
    """Token losses, and what their gradient needs beside the exponentials that were left in the logits' place."""

    losses_T: Tensor
    targets_T: Tensor
    total_T: Tensor
    counted_T: Tensor


def shard_losses(
    wide_TV: Tensor, labels_T: Tensor, first_id: int, num_ids: int, axis: Axis, kernels: Kernels
) -> ShardLosses:
    """Losses of tokens whose vocabulary is split over `axis`; overwrites the fp32 logits with exponentials."""
    if num_ids < wide_TV.shape[1]:
        wide_TV[:, num_ids:] = float("-inf")
    targets_T = labels_T - first_id
    targets_T = torch.where((targets_T >= 0) & (targets_T < num_ids), targets_T, -1)
    row_max_T = all_reduce(kernels.row_max(wide_TV, num_ids), axis, dist.ReduceOp.MAX)
    total_T, target_T = kernels.loss_statistics(wide_TV, targets_T, row_max_T)
    total_T, target_T = all_reduce(torch.stack((total_T, target_T)), axis)
    counted_T = labels_T != IGNORE_LABEL
    return ShardLosses(torch.where(counted_T, total_T.log() - target_T, 0.0), targets_T, total_T, counted_T)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, labels_T: Tensor, first_id: int, num_ids: int, axis: Axis, kernels: Kernels
    ) -> Tensor:
        wide_TV = logits_TV.to(torch.float32)
        found = shard_losses(wide_TV, labels_T, first_id, num_ids, axis, kernels)
        ctx.save_for_backward(wide_TV, found.targets_T, found.total_T, found.counted_T)
        ctx.dtype, ctx.kernels = logits_TV.dtype, kernels
        return found.losses_T

    @staticmethod
    def backward(ctx: Any, dloss_T: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        wide_TV, targets_T, total_T, counted_T = ctx.saved_tensors
        scale_T = torch.where(counted_T, dloss_T, 0.0)
        gradient = ctx.kernels.loss_backward(wide_TV, targets_T, total_T, scale_T)
        return gradient.to(ctx.dtype), None, None, None, None, None


def cross_entropy(
    logits_TV: Tensor, labels_T: Tensor, *, first_id: int, num_ids: int, axis: Axis, kernels: Kernels = REFERENCE
) -> Tensor:
    """-log softmax(logits)[label] for each token.

    Consumes `logits` (fp32 logits are overwritten; that is the memory of one copy saved) and can run backward once.

    Args:
        logits_TV: [T, V], this rank's vocabulary rows, padding columns included.
        labels_T: int64 global ids, or IGNORE_LABEL.
        first_id, num_ids: the ids this rank holds.
        axis: the axis the vocabulary is split over.
        kernels: the backend.

    Returns:
        fp32 [T]; 0 where the label is IGNORE_LABEL. Equal on all ranks of the axis.
    """
    return _CrossEntropy.apply(logits_TV, labels_T, first_id, num_ids, axis, kernels)
