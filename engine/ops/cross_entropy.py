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
from triton_kernels import reference


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor, first_id: int, num_ids: int, axis: Axis) -> Tensor:
        wide_TV = logits_TV.to(torch.float32)
        if num_ids < wide_TV.shape[1]:
            wide_TV[:, num_ids:] = float("-inf")
        # a shard that holds nothing but padding has no maximum of its own
        max_T = wide_TV[:, : max(num_ids, 1)].amax(-1)
        all_reduce(max_T, axis, dist.ReduceOp.MAX)
        targets_T = labels_T - first_id
        targets_T = torch.where((targets_T >= 0) & (targets_T < num_ids), targets_T, -1)
        total_T, target_T = reference.cross_entropy_statistics(wide_TV, targets_T, max_T)
        both = all_reduce(torch.stack((total_T, target_T)), axis)
        total_T, target_T = both[0], both[1]
        counted_T = labels_T != IGNORE_LABEL
        ctx.save_for_backward(wide_TV, targets_T, total_T, counted_T)
        ctx.dtype = logits_TV.dtype
        return torch.where(counted_T, total_T.log() - target_T, 0.0)

    @staticmethod
    def backward(ctx: Any, dloss_T: Tensor) -> tuple[Tensor, None, None, None, None]:
        wide_TV, targets_T, total_T, counted_T = ctx.saved_tensors
        scale_T = torch.where(counted_T, dloss_T, 0.0)
        gradient = reference.cross_entropy_backward(wide_TV, targets_T, total_T, scale_T)
        return gradient.to(ctx.dtype), None, None, None, None


def cross_entropy(logits_TV: Tensor, labels_T: Tensor, *, first_id: int, num_ids: int, axis: Axis) -> Tensor:
    """-log softmax(logits)[label] for each token.

    Consumes `logits` (fp32 logits are overwritten; that is the memory of one copy saved) and can run backward once.

    Args:
        logits_TV: [T, V], this rank's vocabulary rows, padding columns included.
        labels_T: int64 global ids, or IGNORE_LABEL.
        first_id, num_ids: the ids this rank holds.
        axis: the axis the vocabulary is split over.

    Returns:
        fp32 [T]; 0 where the label is IGNORE_LABEL. Equal on all ranks of the axis.
    """
    return _CrossEntropy.apply(logits_TV, labels_T, first_id, num_ids, axis)
