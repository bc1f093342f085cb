"""Collectives as autograd Functions, each with its adjoint.

| forward                         | backward                          |
|---------------------------------|-----------------------------------|
| reduce (all-reduce)             | identity                          |
| split tokens (local slice)      | all-gather (no sum)               |
| join tokens (all-gather)        | local slice                       |
| copy                            | all-reduce                        |
| gather tokens (all-gather)      | reduce-scatter                    |
| scatter the sum (reduce-scatter)| all-gather                        |

Parallel linears do not use these: they overlap the same collectives with their own arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.distributed.collectives import all_gather, all_reduce, local_part, reduce_scatter
from engine.distributed.mesh import Axis

Collective = Callable[[Tensor, Axis], Tensor]


class _Collective(torch.autograd.Function):
    """A row of the table: one collective in forward and another in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, ahead: Collective, back: Collective) -> Tensor:
        ctx.axis, ctx.back = axis, back
        return ahead(x, axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(dy, ctx.axis), None, None, None


def _collective(x: Tensor, axis: Axis, ahead: Collective, back: Collective) -> Tensor:
    found: Tensor = _Collective.apply(x, axis, ahead, back)
    return found


def _same(x: Tensor, axis: Axis) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, axis: Axis) -> Tensor:
    return all_reduce(x.contiguous().clone(), axis)


def _split(x: Tensor, axis: Axis) -> Tensor:
    return local_part(x, axis).clone()


def reduce_from_all(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the axis whose gradient passes unchanged."""
    return x if axis.size == 1 else _collective(x, axis, _sum, _same)


def split_tokens(x: Tensor, axis: Axis) -> Tensor:
    """[T, ...] equal on all ranks -> this rank's [T / size, ...]; the gradient is gathered."""
    return x if axis.size == 1 else _collective(x, axis, _split, all_gather)


def join_tokens(x: Tensor, axis: Axis) -> Tensor:
    """This rank's [T / size, ...] -> [T, ...] on all ranks, where all do the same with it: their gradients are
    equal."""
    return x if axis.size == 1 else _collective(x, axis, all_gather, local_part)


def to_partial(x: Tensor, axis: Axis, *, splits_tokens: bool) -> Tensor:
    """Returns all tokens [T, ...], for a region of which each rank computes a part of a sum: the ranks' gradients are
    summed.

    Args:
        splits_tokens: x has this rank's tokens alone, [T / size, ...].
    """
    if axis.size == 1:
        return x
    return _collective(x, axis, all_gather, reduce_scatter) if splits_tokens else _collective(x, axis, _same, _sum)


def from_partial(x: Tensor, axis: Axis, *, splits_tokens: bool) -> Tensor:
    """Returns the sum over the ranks after such a region; of this rank's tokens where these are split."""
    if axis.size == 1:
        return x
    return _collective(x, axis, reduce_scatter, all_gather) if splits_tokens else _collective(x, axis, _sum, _same)
