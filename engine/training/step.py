"""One optimizer step, without a host synchronisation."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from engine.batch import Batch
from engine.distributed.collectives import all_reduce, all_reduce_async
from engine.distributed.mesh import Mesh
from engine.layers.host_copies import HostCopy
from engine.optim.adamw import FlatAdamW
from engine.optim.reduce import GradientReducer
from engine.training.rank_stages import Stages
from engine.training.reports.phases import PhaseClock


class StepResult(NamedTuple):
    """Device tensors of a step; reading one waits for the device.

    Args:
        loss: 0-dim fp32 mean over the targets of the global batch, before the update.
        grad_norm: 0-dim fp32 norm before clipping.
        metrics: fp32 means of the objective's metrics, and behind them its maxima.
        loss_scale: 0-dim fp32 factor of the loss before backward; 1 where it is not scaled.
    """

    loss: Tensor
    grad_norm: Tensor
    metrics: Tensor
    loss_scale: Tensor


class Figures(NamedTuple):
    """The figures of a step in numbers; see `StepResult`."""

    loss: float
    grad_norm: float
    loss_scale: float
    metrics: list[float]


class StepFigures:
    """The figures of a step on their way to the host; to be constructed right after its launch.

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


class TrainStep:
    """Forward and backward over the micro-batches, reduction, clipping and update.

    The host's numbers for a step are kept in device tensors, which `prepare` writes; from there on nothing depends
    on the host: `on_device` launches the same work in each step, as a graph that replays it must.
    """

    def __init__(self, stages: Stages, reducer: GradientReducer, optimizer: FlatAdamW, mesh: Mesh) -> None:
        self._stages, self._reducer, self._optimizer, self._mesh = stages, reducer, optimizer, mesh
        self._target_count = torch.ones((), dtype=torch.float32, device=stages.step.device)
        self._lr = torch.zeros_like(self._target_count)
        self.phases = PhaseClock(stages.step.device)
        self._unscaled = torch.ones_like(self._target_count)

    @property
    def stages(self) -> Stages:
        """The stages through which forward and backward run."""
        return self._stages

    def with_stages(self, stages: Stages) -> TrainStep:
        """Returns the same step through other stages of the same model."""
        return TrainStep(stages, self._reducer, self._optimizer, self._mesh)

    def gradients(self, batches: list[Batch], target_count: float) -> Tensor:
        """Writes the global batch's summed gradient, times the loss scale where there is one, into the flat buffer.

        Returns:
            0-dim fp32 mean loss over the targets of the global batch.
        """
        self._target_count.fill_(target_count)
        return self._gradients(batches)[0]

    def _gradients(self, batches: list[Batch]) -> Tensor:
        """Returns fp32 [1 + metrics + maxima]: means of the loss and the objective's metrics over the global batch,
        and the largest of its maxima."""
        sums = self._stages.gradients(batches, self._target_count, before_last_backward=self._reducer.arm)
        self.phases.passed("forward_backward")
        figures, handle = all_reduce_async(sums, self._mesh.dp_cp)  # hidden by the gradients' sum
        self._reducer.finish()
        handle.wait()
        means = all_reduce(figures, self._mesh.pp) / self._target_count.clamp(min=1.0)
        maxima = self._stages.maxima()
        if maxima.numel():
            for axis in (self._mesh.dp_cp, self._mesh.pp):
                maxima = all_reduce(maxima, axis, dist.ReduceOp.MAX)
            means = torch.cat((means, maxima))
        self.phases.passed("reduce")
        return means

    def __call__(self, batches: list[Batch], target_count: float, lr: float) -> StepResult:
        """Takes one step on this rank's micro-batches.

        Args:
            batches: as the loader gives them.
            target_count: sum of the loss weights over the global batch.
            lr: learning rate.
        """
        self.prepare(target_count, lr)
        return self.on_device(batches)

    def prepare(self, target_count: float, lr: float) -> None:
        """Writes the numbers of the step that comes next; arguments as for a whole step."""
        self._target_count.fill_(target_count)
        self._lr.fill_(lr)

    def on_device(self, batches: list[Batch]) -> StepResult:
        """Launches the step that was prepared."""
        self.phases.begin()
        figures = self._gradients(batches)
        loss_scale = self._optimizer.loss_scale
        # a copy: the update may change it, and a step's result is the caller's
        scale = (self._unscaled if loss_scale is None else loss_scale.value).clone()
        norm = self._optimizer.step(self._lr, figures[0])
        self._stages.step.add_(1)
        self.phases.passed("optimizer", last=True)
        return StepResult(figures[0], norm, figures[1:], scale)
