"""Figures on their way from the device to the host, each waited for by itself.

Reading a tensor of the device (`.item()`, `float`) waits for everything on the current stream, and so for the step that
was launched after the one that is asked about. A copy that is started right behind a step is there when that step has
run, and the host can prepare further steps while the device computes the next one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.training.step import StepResult


class HostCopy:
    """A tensor as it is after all that was launched so far on the current stream. On a CPU it is copied at once.

    Args:
        tensor: small, on the device.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._passed: torch.cuda.Event | None = None
        if tensor.device.type != "cuda":
            self._host = tensor.clone()
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._passed = torch.cuda.Event()
        self._passed.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> Tensor:
        """Returns the copy, in host memory; waits for what was launched before it, and for nothing behind."""
        if self._passed is not None:
            self._passed.synchronize()
        return self._host


class Figures(NamedTuple):
    """The figures of a step in numbers; see `StepResult`."""

    loss: float
    grad_norm: float
    loss_scale: float
    metrics: list[float]
    router: list[float]


class StepFigures:
    """The figures of a step, to be made right after it was launched.

    Args:
        result: of the step.
    """

    def __init__(self, result: StepResult) -> None:
        numbers = torch.stack((result.loss, result.grad_norm, result.loss_scale))
        self._num_metrics = len(result.metrics)
        self._copy = HostCopy(torch.cat((numbers, result.metrics, result.router)))

    def read(self) -> Figures:
        """Waits for the step, and for nothing that was launched after it."""
        loss, grad_norm, loss_scale, *more = self._copy.read().tolist()
        return Figures(loss, grad_norm, loss_scale, more[: self._num_metrics], more[self._num_metrics :])
