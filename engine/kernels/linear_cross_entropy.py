"""Loss of a frozen head without its logits: linear and cross-entropy together, some tokens at a time.

    logits = x W^T (a chunk of tokens), statistics of the shard, [combine over the shards], loss,
    dlogits over the logits, dx = dlogits W

Two matrix products and three passes over a chunk's logits; the buffer of one chunk is used for all. Because the head
is frozen and the scale of each token's loss is known beforehand, forward computes the input gradient, and backward has
nothing more to compute.

Plain torch: the statistics are arguments (`LossKernels`), so that the same loop serves every backend. No collective is
called here either: with a split vocabulary the caller passes functions that combine three numbers a token over shards.

Bytes (compulsory): x and W read, dx written: (2 T h + V h) elements; arithmetic: 4 T h V.

Legend: T tokens, C tokens of a chunk, h hidden size, V vocabulary rows held here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

GPU_TOKENS = 1024
"""`tokens_multiple` of a GPU. Its library cuts a product into tiles of 128 x 256: 1024 tokens leave none of them in
part, and the input gradient of a hidden size of 4096 has 128 of them, a wave of the 132 multiprocessors of an H100."""

MOMENT_NUMBERS = 2**22
"""Logits whose wide copies `entropy_moment` holds at a time."""

Combine = Callable[[Tensor], Tensor]
"""Maximum, or sum, of a tensor over the shards of the vocabulary; may work in place."""


def _wide(tensor: Tensor) -> torch.dtype:
    """Returns the dtype that statistics are kept in."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def entropy_moment(logits_CV: Tensor) -> Tensor:
    """Returns sum of exp(logit - maximum) (logit - maximum), fp32 (or fp64) [C]; some tokens at a time, so that no wide
    copy of all logits exists.
    """
    moment_C = torch.empty(logits_CV.shape[0], dtype=_wide(logits_CV), device=logits_CV.device)
    count = max(1, MOMENT_NUMBERS // max(1, logits_CV.shape[1]))
    for start in range(0, logits_CV.shape[0], count):
        block = slice(start, start + count)
        shifted = logits_CV[block].to(moment_C.dtype)
        shifted = shifted - shifted.amax(-1, keepdim=True)
        # a logit of -inf adds nothing
        moment_C[block] = shifted.exp().mul_(shifted.clamp_(min=torch.finfo(shifted.dtype).min)).sum(-1)
    return moment_C


def entropy_gradient(logits_CV: Tensor, max_C: Tensor, total_C: Tensor, entropies_C: Tensor, scale_C: Tensor) -> Tensor:
    """Returns -scale p (log p + H), the gradient of sum(scale * H) with respect to the logits, written over them; some
    tokens at a time.

    Args:
        max_C, total_C, entropies_C: of the whole vocabulary.
        scale_C: weight of each token's entropy H.
    """
    count = max(1, MOMENT_NUMBERS // max(1, logits_CV.shape[1]))
    # log p + H, in which the logarithm of the total cancels, is a logit less the mean of all
    minus_mean_C, factor_C = entropies_C - total_C.log(), -scale_C / total_C
    for start in range(0, logits_CV.shape[0], count):
        block = slice(start, start + count)
        shifted = logits_CV[block].to(max_C.dtype) - max_C[block, None]
        # a logit of -inf has no part in it
        further = shifted.clamp(min=torch.finfo(shifted.dtype).min).add_(minus_mean_C[block, None])
        logits_CV[block] = further.mul_(shifted.exp_()).mul_(factor_C[block, None])
    return logits_CV


@dataclass(frozen=True, kw_only=True, slots=True)
class LossKernels:
    """The backend's part of the loss.

    Args:
        statistics: (logits_CV, targets_C) -> fp32 maximum, sum of exp(logit - maximum), target's logit, each [C], of
            this shard; the target's logit is 0 where the target lies elsewhere. May overwrite the logits.
        gradient: (logits_CV, targets_C, local_max_C, max_C, total_C, scale_C) -> (softmax - onehot) * scale, written
            over the result of `statistics`; local_max is this shard's, max and total the whole vocabulary's.
        moment: logits_CV -> sum of exp(logit - maximum) (logit - maximum) of this shard, [C], from which entropies are
            computed. Called before `statistics`, and leaves the logits as they are.
        entropy_gradient: (logits_CV, max_C, total_C, entropies_C, scale_C) -> the gradient of the entropies, written
            over the logits as they were before `statistics`; see there.
        product: as torch.mm, with `out`.
        tokens_multiple: products with the head use the machine well for so many tokens, or a multiple.
    """

    statistics: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    moment: Callable[[Tensor], Tensor] = entropy_moment
    entropy_gradient: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] = entropy_gradient
    product: Callable[..., Tensor] = torch.mm
    tokens_multiple: int = 1

    def shard_statistics(self, logits_CV: Tensor, targets_C: Tensor, *, with_moment: bool = False) -> Statistics:
        """Returns `statistics`, also for a shard of padding alone: it has no maximum, and adds nothing.

        Args:
            logits_CV, targets_C: as for `statistics`.
            with_moment: the moment too.
        """
        if logits_CV.shape[1] > 0:
            moment_C = self.moment(logits_CV) if with_moment else None
            return Statistics(*self.statistics(logits_CV, targets_C), moment_C)
        nothing_C = torch.zeros(logits_CV.shape[0], dtype=_wide(logits_CV), device=logits_CV.device)
        return Statistics(nothing_C - float("inf"), nothing_C, nothing_C, nothing_C if with_moment else None)


class Statistics(NamedTuple):
    """Softmax statistics of a shard, or of the whole vocabulary; each [C].

    Args:
        maximum: of the logits.
        total: sum of exp(logit - maximum).
        target: the target's logit; 0 where it lies elsewhere.
        moment: sum of exp(logit - maximum) (logit - maximum); None where no entropies are wanted.
    """

    maximum: Tensor
    total: Tensor
    target: Tensor
    moment: Tensor | None = None

    def losses(self) -> Tensor:
        """Returns -log softmax(logits)[target]."""
        # large logits cancel first, before anything small is added
        return self.total.log() + (self.maximum - self.target)

    def entropies(self) -> Tensor:
        """Returns -sum of p log p, p = softmax(logits), of the whole vocabulary's statistics."""
        assert self.moment is not None, "statistics without the moment"
        return self.total.log() - self.moment / self.total


def linear_cross_entropy(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    scale_T: Tensor | None,
    kernels: LossKernels,
    *,
    first_id: int = 0,
    num_ids: int | None = None,
    combine_max: Combine | None = None,
    combine_sum: Combine | None = None,
    chunk_tokens: int = 1024,
    entropies_T: Tensor | None = None,
    entropy_dhidden_TH: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Returns token losses, and the gradient of sum(scale * loss) with respect to `hidden`.

    Args:
        hidden_TH: [T, h].
        weight_VH: [V, h], this shard's rows, padding rows last.
        labels_T: int64 global ids; negative where there is no label.
        scale_T: fp32 [T] weight of each token's loss in the sum that is differentiated; None for the losses alone.
        kernels: see there.
        first_id, num_ids: the ids this shard holds; `num_ids` None for all rows of `weight`.
        combine_max, combine_sum: over the shards; None with one shard. Every shard must have the same tokens.
        chunk_tokens: tokens at a time; the buffer is [chunk_tokens, V] in hidden's dtype.
        entropies_T: fp32 [T] that the entropies of all tokens' distributions are written to; None where they are
            not asked for.
        entropy_dhidden_TH: [T, h] that this shard's partial sum of the gradient of the sum of all entropies is written
            to; None where it is not asked for.

    Returns:
        fp32 [T] losses (0 without a label), the same on every shard; and [T, h] in hidden's dtype, this shard's partial
        sum of the input gradient, or None.
    """
    num_tokens = hidden_TH.shape[0]
    weight_VH = weight_VH if num_ids is None else weight_VH[:num_ids]
    num_rows = weight_VH.shape[0]
    counted_T = labels_T >= 0
    local_T = labels_T - first_id
    targets_T = torch.where(counted_T & (local_T >= 0) & (local_T < num_rows), local_T, -1)
    wide = _wide(hidden_TH)
    scale_T = None if scale_T is None else torch.where(counted_T, scale_T.to(wide), 0.0)
    loss_T = torch.empty(num_tokens, dtype=wide, device=hidden_TH.device)
    dhidden_TH = None if scale_T is None else torch.empty_like(hidden_TH, memory_format=torch.contiguous_format)
    buffer = hidden_TH.new_empty(min(chunk_tokens, num_tokens), num_rows)
    for start in range(0, num_tokens, chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        targets_C = targets_T[chunk]
        logits_CV = kernels.product(hidden_TH[chunk], weight_VH.t(), out=buffer[: targets_C.shape[0]])
        kept_CV = None if entropy_dhidden_TH is None else logits_CV.clone()
        local = kernels.shard_statistics(logits_CV, targets_C, with_moment=entropies_T is not None)
        whole = combine_statistics(local, combine_max=combine_max, combine_sum=combine_sum)
        loss_T[chunk] = whole.losses()
        if entropies_T is not None:
            entropies_T[chunk] = whole.entropies()
        if kept_CV is not None and entropy_dhidden_TH is not None:
            if num_rows > 0:
                ones_C = torch.ones_like(whole.total)
                kernels.entropy_gradient(kept_CV, whole.maximum, whole.total, whole.entropies(), ones_C)
            kernels.product(kept_CV, weight_VH, out=entropy_dhidden_TH[chunk])
        if dhidden_TH is not None and scale_T is not None:
            if num_rows > 0:
                kernels.gradient(logits_CV, targets_C, local.maximum, whole.maximum, whole.total, scale_T[chunk])
            kernels.product(logits_CV, weight_VH, out=dhidden_TH[chunk])
    return torch.where(counted_T, loss_T, 0.0), dhidden_TH


def combine_statistics(local: Statistics, *, combine_max: Combine | None, combine_sum: Combine | None) -> Statistics:
    """Returns the statistics of the whole vocabulary from a shard's; the same where there is one shard."""
    if combine_max is None or combine_sum is None:
        return local
    whole_max = combine_max(local.maximum.clone())
    share = torch.exp(local.maximum - whole_max)
    parts = [local.total * share, local.target]
    if local.moment is not None:
        # relative to the maximum of all; a shard of padding alone has no maximum and adds nothing
        further = torch.where(local.total > 0, (local.maximum - whole_max) * local.total, 0.0)
        parts.append((local.moment + further) * share)
    return Statistics(whole_max, *combine_sum(torch.stack(parts)).unbind())


def bytes_moved(num_tokens: int, hidden: int, num_rows: int, itemsize: int) -> int:
    """Returns the compulsory bytes: hidden and weight read once, the input gradient written once."""
    return (2 * num_tokens + num_rows) * hidden * itemsize


def arithmetic(num_tokens: int, hidden: int, num_rows: int) -> int:
    """Returns the floating-point operations of the two products."""
    return 4 * num_tokens * hidden * num_rows
