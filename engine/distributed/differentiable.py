"""Collectives as autograd Functions, each with its adjoint.

| forward                         | backward                          |
|---------------------------------|-----------------------------------|
| reduce (all-reduce)             | identity                          |
| split tokens (local slice)      | all-gather (no sum)               |

Parallel linears do not use these: they overlap the same collectives with their own arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.distributed.collectives import all_gather, all_reduce, local_part
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
