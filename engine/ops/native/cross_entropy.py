"""Cross-entropy over a vocabulary shard by the compiled kernels; the plain spec is triton_kernels.reference."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.native.arguments import matrix, threads, vector
from engine.ops.native.loader import library


def cross_entropy_row_max(logits_TV: Tensor, num_ids: int | None = None) -> Tensor:
    """fp32 [T], the maximum over the first `num_ids` columns (all where None); -inf where there are none."""
    rows, columns = logits_TV.shape
    counted = columns if num_ids is None else num_ids
    assert 0 <= counted <= columns, (counted, columns)
    maxima = torch.empty(rows)
    library().engine_cross_entropy_row_max(threads(), rows, counted, *matrix(logits_TV), maxima.data_ptr())
    return maxima


def cross_entropy_statistics(
    logits_TV: Tensor, targets_T: Tensor, row_max_T: Tensor | None, *, num_ids: int | None = None
) -> tuple[Tensor, Tensor]:
    """What a shard adds to the loss: sum of exponentials [T] and shifted target logit [T].

    Overwrites `logits` with exp(logits - max), and with 0 in the columns after `num_ids`.

    Args:
        logits_TV: fp32 logits of the vocabulary rows held here.
        targets_T: int64 row of this shard; anything outside [0, num_ids) where the target lies elsewhere.
        row_max_T: fp32 maximum over the whole vocabulary. None where this shard is the whole vocabulary: the maximum is
            then found while the row is in the cache.
        num_ids: columns that are no padding; None for all.
    """
    rows, columns = logits_TV.shape
    counted = columns if num_ids is None else num_ids
    assert 0 <= counted <= columns, (counted, columns)
    maxima = torch.empty(rows) if row_max_T is None else row_max_T
    totals, target_logits = torch.empty(rows), torch.empty(rows)
    library().engine_cross_entropy_statistics(
        threads(), rows, columns, counted, *matrix(logits_TV), vector(targets_T, rows, torch.int64),
        vector(maxima, rows), int(row_max_T is None), totals.data_ptr(), target_logits.data_ptr(),
    )  # fmt: skip
    return totals, target_logits


def cross_entropy_backward(
    exponentials_TV: Tensor, targets_T: Tensor, total_T: Tensor, scale_T: Tensor, *, num_ids: int | None = None
) -> Tensor:
    """d loss / d logits = (softmax - onehot) * scale, written over the exponentials that forward left.

    Args:
        exponentials_TV: as `cross_entropy_statistics` left them.
        targets_T: int64, those of forward.
        total_T: fp32 sum of exponentials over the whole vocabulary.
        scale_T: fp32 gradient of each token's loss.
        num_ids: columns that are no padding, as in forward.
    """
    rows, columns = exponentials_TV.shape
    counted = columns if num_ids is None else num_ids
    assert 0 <= counted <= columns, (counted, columns)
    library().engine_cross_entropy_backward(
        threads(), rows, columns, counted, *matrix(exponentials_TV), vector(targets_T, rows, torch.int64),
        vector(total_T, rows), vector(scale_T, rows),
    )  # fmt: skip
    return exponentials_TV
