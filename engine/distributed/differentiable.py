"""Collectives as autograd Functions, in adjoint pairs.

| forward                         | backward                          |
|---------------------------------|-----------------------------------|
| copy (identity)                 | all-reduce                        |
| reduce (all-reduce)             | copy (identity)                   |
| gather tokens (all-gather)      | reduce-scatter tokens             |
| reduce-scatter tokens           | gather tokens                     |
| split tokens (local slice)      | gather tokens (no sum)            |

Parallel linears do not use these: they overlap the same collectives with their own arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.distributed.collectives import all_gather, all_reduce, local_part, reduce_scatter
from engine.distributed.mesh import Axis


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return all_reduce(dy.contiguous().clone(), ctx.axis), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce(x.contiguous().clone(), axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_gather(x, axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(dy, ctx.axis), None


class _ReduceScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return reduce_scatter(x, axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return all_gather(dy, ctx.axis), None


class _SplitTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return local_part(x, axis).clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return all_gather(dy, ctx.axis), None


def copy_to_all(x: Tensor, axis: Axis) -> Tensor:
    """Identity whose gradient is summed over the axis."""
    return x if axis.size == 1 else _Copy.apply(x, axis)


def reduce_from_all(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the axis whose gradient passes unchanged."""
    return x if axis.size == 1 else _Reduce.apply(x, axis)


def gather_tokens(x: Tensor, axis: Axis) -> Tensor:
    """[T / size, ...] -> [T, ...]; the gradient is summed and scattered."""
    return x if axis.size == 1 else _GatherTokens.apply(x, axis)


def reduce_scatter_tokens(x: Tensor, axis: Axis) -> Tensor:
    """[T, ...] partial sums -> [T / size, ...]; the gradient is gathered."""
    return x if axis.size == 1 else _ReduceScatterTokens.apply(x, axis)


def split_tokens(x: Tensor, axis: Axis) -> Tensor:
    """[T, ...] equal on all ranks -> this rank's [T / size, ...]; the gradient is gathered."""
    return x if axis.size == 1 else _SplitTokens.apply(x, axis)
