"""A step whose layers are replayed: captures them after a few steps, and counts the replays."""

from __future__ import annotations

import gc

from engine.batch import Batch
from engine.training.cuda_graph.capture import WARMUP_STEPS, Capture, GraphCounts
from engine.training.cuda_graph.static_batch import StaticShape
from engine.training.rank_stages import Stages
from engine.training.step import StepResult, TrainStep


class LayerGraphs:
    """Takes the place of a `TrainStep`: called the same way, with the same result.

    Args:
        step: the step.
        stages: those of the step, whose layers are captured.
        capture: the way to capture.
        shape: of each micro-batch.
    """

    def __init__(self, step: TrainStep, stages: Stages, capture: Capture, shape: StaticShape) -> None:
        self._step, self._stages, self._capture, self.shape = step, stages, capture, shape
        self._steps = 0
        self.counts = GraphCounts("micro-batches")

    def __call__(self, batches: list[Batch], target_count: float, lr: float) -> StepResult:
        """See `TrainStep.__call__`."""
        with self._capture.running():
            if self._steps == WARMUP_STEPS:
                gc.collect()  # a dead cycle may hold nodes of an earlier step
                self._stages.capture_layers(self._capture, self.shape, len(batches))
            self._steps += 1
            fitting = sum(map(self.shape.fits, batches))
            if self._steps <= WARMUP_STEPS:
                self.counts.warmup += len(batches)
            else:
                self.counts.replayed += fitting
                self.counts.beside += len(batches) - fitting
            return self._step(batches, target_count, lr)
