"""Cross-entropy over a vocabulary shard by the compiled kernels; the plain spec is engine.kernels.reference_fused."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.native.arguments import matrix, threads, type_number, vector
from engine.kernels.native.loader import library


def local_statistics(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a shard's statistics of the loss, from one pass over its logits.

    fp32 logits become exp(logit - maximum). Logits in bfloat16 stay: their exponentials would be rounded to it, and
    once more when the gradient is made from them.

    Args:
        logits_TV: fp32 or bfloat16 logits of the vocabulary rows held here, at least one; rows of any stride.
        targets_T: int64 column of this shard; anything else where the target lies elsewhere.

    Returns:
        fp32 [T]: maximum, sum of exp(logit - maximum), and the target's logit (0 where the target lies elsewhere).
    """
    rows, columns = logits_TV.shape
    results = torch.empty(3, rows)
    library().engine_cross_entropy_statistics(
        threads(),
        type_number(logits_TV),
        rows,
        columns,
        *matrix(logits_TV, dtype=logits_TV.dtype),
        vector(targets_T, rows, torch.int64),
        *(vector(result, rows) for result in results),
    )
    return results[0], results[1], results[2]


def local_gradient(
    left_TV: Tensor, targets_T: Tensor, local_max_T: Tensor, max_T: Tensor, total_T: Tensor, scale_T: Tensor
) -> Tensor:
    """Computes d loss / d logits = (softmax - onehot) * scale, written over the result of `local_statistics`.

    Args:
        targets_T: int64, those of `local_statistics`.
        local_max_T: fp32, this shard's maximum.
        max_T, total_T: fp32, maximum and sum of exponentials over the whole vocabulary.
        scale_T: fp32 gradient of each token's loss.
    """
    rows, columns = left_TV.shape
    own_total_T = total_T * torch.exp(max_T - local_max_T)  # the exponentials are relative to this shard's maximum
    library().engine_cross_entropy_backward(
        threads(),
        type_number(left_TV),
        rows,
        columns,
        *matrix(left_TV, dtype=left_TV.dtype),
        vector(targets_T, rows, torch.int64),
        vector(local_max_T, rows),
        vector(own_total_T, rows),
        vector(scale_T, rows),
    )
    return left_TV
