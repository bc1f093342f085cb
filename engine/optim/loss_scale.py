"""Dynamic loss scaling for float16 (arXiv 1710.03740): keeps small gradients from becoming zeros.

The loss is multiplied by the scale before backward, and the optimizer's clip factor removes it from the fp32
gradient. Where the gradient is not finite the step is skipped and the scale halved; after a window of good steps it
doubles. All of it lies in device tensors, and every rank computes the same values from the common norm.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOOR, CEILING = 1.0, 2.0**24
"""The scale stays between these."""


class LossScale:
    """The scale, and the count that decides when it grows.

    Args:
        initial: scale of the first step; a power of two, so that scaling rounds nothing.
        window: good steps in a row after which it doubles.
        device: where the tensors lie.
    """

    def __init__(self, initial: float, window: int, device: torch.device) -> None:
        self._window = window
        self.value = torch.full((), initial, dtype=torch.float32, device=device)
        """The factor of the next step's loss."""
        self.good_steps = torch.zeros_like(self.value)
        """Steps in a row without an overflow since the scale last changed."""
        self.overflow = torch.zeros_like(self.value)
        """1 where the last gradient was not finite."""

    def tensors(self) -> list[Tensor]:
        """Returns all tensors that a step changes."""
        return [self.value, self.good_steps, self.overflow]

    def update(self, norm: Tensor) -> None:
        """Adjusts the scale after a step.

        Args:
            norm: 0-dim fp32 norm of the step's gradient, equal on all ranks.
        """
        self.overflow.copy_(~torch.isfinite(norm))
        self.good_steps.add_(1.0).mul_(1.0 - self.overflow)
        grows = (self.good_steps >= self._window).float()
        self.value.mul_((1.0 + grows) * (1.0 - 0.5 * self.overflow)).clamp_(FLOOR, CEILING)
        self.good_steps.mul_(1.0 - grows)
