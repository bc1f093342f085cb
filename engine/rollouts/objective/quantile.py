"""An exact quantile of numbers that are spread over ranks, without bringing them together and without the host.

The k-th smallest is found digit by digit: numbers of 0 and more are ordered as their bits are, so a histogram of the
highest bits says in which bin it lies, one of the next bits where in that bin, and so on (radix selection). Only
histograms cross the ranks, of a fixed size, whatever the number of tokens of each.

Legend: T numbers held here, R order statistics to find, B bins.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_DIGITS = (11, 10, 10)
"""Bits of a positive float32, from the highest."""

Sum = Callable[[Tensor], Tensor]
"""The sum of a tensor over all ranks; may work in place."""


def quantile(values_T: Tensor, counted_T: Tensor, share: float, add: Sum) -> Tensor:
    """Returns the quantile of all ranks' numbers, as torch.quantile does: interpolated between two neighbours.

    Args:
        values_T: fp32, 0 or more; anything below counts as 0.
        counted_T: bool, whether each number counts.
        share: from 0 to 1.
        add: over the ranks.

    Returns:
        0-dim fp32; meaningless where there is no number on any rank.
    """
    count = add(counted_T.sum())
    place = (count - 1).clamp(min=0).float() * share
    below = place.floor()
    lower, upper = _smallest(values_T, counted_T, torch.stack((below, place.ceil())).long(), add).unbind()
    return torch.lerp(lower, upper, place - below)


def _smallest(values_T: Tensor, counted_T: Tensor, orders_R: Tensor, add: Sum) -> Tensor:
    """Returns the numbers that `orders_R` smaller ones come before, fp32 [R]."""
    bits_T = values_T.clamp(min=0).view(torch.int32).long()
    ones_RT = torch.ones((len(orders_R), len(bits_T)), dtype=torch.int64, device=bits_T.device)
    found_R, left_R = torch.zeros_like(orders_R), orders_R
    shift = sum(_DIGITS)
    for width in _DIGITS:
        shift -= width
        inside_RT = counted_T & ((bits_T >> (shift + width)) == found_R[:, None])
        digits_RT = ((bits_T >> shift) & ((1 << width) - 1)).expand_as(inside_RT)
        counts_RB = torch.zeros((len(orders_R), 1 << width), dtype=torch.int64, device=bits_T.device)
        ends_RB = add(counts_RB.scatter_add_(1, digits_RT, ones_RT * inside_RT)).cumsum(1)
        bins_R1 = (ends_RB <= left_R[:, None]).sum(1, keepdim=True).clamp(max=(1 << width) - 1)
        before_R = torch.where(bins_R1 > 0, ends_RB.gather(1, (bins_R1 - 1).clamp(min=0)), 0)[:, 0]
        found_R, left_R = (found_R << width) | bins_R1[:, 0], left_R - before_R
    return found_R.int().view(torch.float32)
