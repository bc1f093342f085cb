"""Small functions of activations and parameters, computed by plain torch and run again in backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.layers.module import ShardEntry
from engine.ops.gradients import GradientSink

Function = Callable[..., tuple[Tensor, ...]]


class _Rerun(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: Function, sinks: tuple[GradientSink | None, ...], count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.run, ctx.sinks, ctx.count = run, sinks, count
        return run(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        wanted = [*ctx.needs_input_grad[3 : 3 + ctx.count], *(sink is not None for sink in ctx.sinks)]
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(is_wanted) for x, is_wanted in zip(tensors, wanted, strict=True)]
            results = ctx.run(*leaves)
            read = [(result, d) for result, d in zip(results, gradients, strict=True) if result.requires_grad]
            found = iter(
                torch.autograd.grad(
                    [result for result, _ in read], [x for x in leaves if x.requires_grad], [d for _, d in read]
                )
            )
        every = [next(found) if is_wanted else None for is_wanted in wanted]
        for sink, gradient in zip(ctx.sinks, every[ctx.count :], strict=True):
            if sink is not None and gradient is not None:
                sink.add(gradient)
        return None, None, None, *every[: ctx.count], *([None] * len(ctx.sinks))


def of_parameters(run: Function, activations: Sequence[Tensor], parameters: Sequence[ShardEntry]) -> tuple[Tensor, ...]:
    """Returns run(*activations, *parameters); gradients of trained parameters go to their sinks."""
    found: tuple[Tensor, ...] = _Rerun.apply(
        run,
        tuple(entry.sink for entry in parameters),
        len(activations),
        *activations,
        *(entry.parameter for entry in parameters),
    )
    return found
