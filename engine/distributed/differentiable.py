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

from typing import Any

import torch
from torch import Tensor

from engine.distributed.collectives import all_gather, all_reduce, local_part, reduce_scatter
from engine.distributed.mesh import Axis


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce(x.contiguous().clone(), axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class _SplitTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return local_part(x, axis).clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return all_gather(dy, ctx.axis), None


def reduce_from_all(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the axis whose gradient passes unchanged."""
    return x if axis.size == 1 else _Reduce.apply(x, axis)


def split_tokens(x: Tensor, axis: Axis) -> Tensor:
    """[T, ...] equal on all ranks -> this rank's [T / size, ...]; the gradient is gathered."""
    return x if axis.size == 1 else _SplitTokens.apply(x, axis)


def join_tokens(x: Tensor, axis: Axis) -> Tensor:
    """This rank's [T / size, ...] -> [T, ...] on all ranks, where all do the same with it: their gradients are
    equal."""
    return x if axis.size == 1 else _JoinTokens.apply(x, axis)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return all_reduce(dy.contiguous().clone(), ctx.axis), None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_gather(x.contiguous(), axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(dy.contiguous(), ctx.axis), None


class _JoinTokens(_GatherTokens):
    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return local_part(dy, ctx.axis), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return reduce_scatter(x.contiguous(), axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return all_gather(dy.contiguous(), ctx.axis), None


def to_partial(x: Tensor, axis: Axis, *, splits_tokens: bool) -> Tensor:
    """Returns all tokens [T, ...], for a region of which each rank computes a part of a sum: the ranks' gradients are
    summed.

    Args:
        splits_tokens: x has this rank's tokens alone, [T / size, ...].
    """
    if axis.size == 1:
        return x
    return _GatherTokens.apply(x, axis) if splits_tokens else _Copy.apply(x, axis)


def from_partial(x: Tensor, axis: Axis, *, splits_tokens: bool) -> Tensor:
    """Returns the sum over the ranks after such a region; of this rank's tokens where these are split."""
    if axis.size == 1:
        return x
    return _ScatterSum.apply(x, axis) if splits_tokens else _Reduce.apply(x, axis)
