"""A step's figures on their way from the device to the host; see `engine.layers.host_copies.HostCopy`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.layers.host_copies import HostCopy
from engine.training.step import StepResult


class Figures(NamedTuple):
    """The figures of a step in numbers; see `StepResult`."""

    loss: float
    grad_norm: float
    loss_scale: float
    metrics: list[float]


class StepFigures:
    """The figures of a step; to be constructed right after its launch.

    Args:
        result: of the step.
    """

    def __init__(self, result: StepResult) -> None:
        numbers = torch.stack((result.loss, result.grad_norm, result.loss_scale))
        self._copy = HostCopy(torch.cat((numbers, result.metrics)))

    def read(self) -> Figures:
        """Waits for the step, but not for later launches."""
        loss, grad_norm, loss_scale, *metrics = self._copy.read().tolist()
        return Figures(loss, grad_norm, loss_scale, metrics)
