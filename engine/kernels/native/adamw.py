"""AdamW on flat fp32 shards by the compiled kernel, one pass over memory."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.native.arguments import optional_vector, threads, vector
from engine.kernels.native.loader import library


def adamw_step(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: Tensor,
    step_count: Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    clip: Tensor | None = None,
    skip: Tensor | None = None,
    low_precision: Tensor | None = None,
    zero_gradient: bool = False,
) -> None:
    """Updates once in place, as torch's fused AdamW with a gradient multiplied by `clip`.

    Args:
        parameter, gradient, exp_avg, exp_avg_sq: dense fp32 of one size.
        lr: fp32 0-dim learning rate.
        step_count: fp32 0-dim count of updates before this one; not changed.
        betas, eps, weight_decay: of AdamW; decay is decoupled.
        clip: fp32 0-dim factor of the gradient; None for 1.
        skip: fp32 0-dim; where it is not 0, weights and moments stay as they are.
        low_precision: bf16, the updated weights are written there as well.
        zero_gradient: leave the gradient as zeros, whether or not the step was skipped.
    """
    size = parameter.numel()
    library().engine_adamw(
        threads(),
        size,
        vector(parameter, size),
        vector(gradient, size),
        vector(exp_avg, size),
        vector(exp_avg_sq, size),
        optional_vector(low_precision, size, torch.bfloat16),
        vector(lr, 1),
        vector(step_count, 1),
        optional_vector(clip, 1),
        optional_vector(skip, 1),
        betas[0],
        betas[1],
        eps,
        weight_decay,
        int(zero_gradient),
    )


def square_sum(values: Tensor) -> Tensor:
    """Returns the sum of the squares of a dense fp32 tensor, fp64 0-dim."""
    result = torch.empty((), dtype=torch.float64)
    library().engine_square_sum(threads(), values.numel(), vector(values, values.numel()), result.data_ptr())
    return result
