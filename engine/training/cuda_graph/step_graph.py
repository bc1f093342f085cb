"""Steps that replay graphs: `StepGraph` the whole step as one, `LayerGraphs` those of its layers (`layer_graphs`).

The whole step is forward and backward of all micro-batches, reduction, clipping, update, publishing; recomputation,
accumulation and collectives of tensor and data parallelism are part of it. Where ranks share a collective, all of them
must replay together, so that either all ranks' micro-batches fit or none do; the capacity is chosen so that they always
do (`static_batch.document_capacity`). The graph keeps its activations' memory; a step beside it, and an evaluation,
need theirs on top.
"""

from __future__ import annotations

import gc

import torch

from engine.batch import Batch
from engine.layers.graph_capture import Capture, Replayable
from engine.training.cuda_graph.counts import WARMUP_STEPS, GraphCounts
from engine.training.cuda_graph.static_batch import StaticBatch, StaticShape
from engine.training.rank_stages import Stages
from engine.training.step import StepResult, TrainStep


class StepGraph:
    """Takes the place of a `TrainStep`: called the same way, with the same result.

    Args:
        step: to capture.
        capture: the way to capture.
        shape: of each micro-batch.
        num_microbatches: of a step.
        device: that the step runs on.
    """

    def __init__(
        self, step: TrainStep, capture: Capture, shape: StaticShape, *, num_microbatches: int, device: torch.device
    ) -> None:
        self._step, self._capture, self.shape = step, capture, shape
        self._places = [StaticBatch(shape, device) for _ in range(num_microbatches)]
        self._batches = [place.batch for place in self._places]
        self._graph: Replayable | None = None
        self.counts = GraphCounts("steps")

    def __call__(self, batches: list[Batch], target_count: float, lr: float) -> StepResult:
        """See `TrainStep.__call__`."""
        assert len(batches) == len(self._places), (len(batches), len(self._places))
        with self._capture.running():
            self._step.prepare(target_count, lr)
            if not all(map(self.shape.fits, batches)):
                self.counts.beside += 1
                return self._step.on_device(batches)
            for place, batch in zip(self._places, batches, strict=True):
                place.load(batch)
            if self.counts.warmup < WARMUP_STEPS:
                self.counts.warmup += 1
                return self._step.on_device(self._batches)
            return self._replay()

    def _replay(self) -> StepResult:
        if self._graph is None:
            gc.collect()  # a dead cycle may hold nodes of an earlier step
            self._graph = self._capture.capture(
                lambda: tuple(self._step.on_device(self._batches)), self._capture.new_pool()
            )
        self._graph.replay()
        self.counts.replayed += 1
        # the next replay writes the same memory, and the caller may read the figures later than that
        return StepResult(*(output.clone() for output in self._graph.outputs))


class LayerGraphs:
    """Takes the place of a `TrainStep`, called the same way, with the same result: captures its layers after a few
    steps, and counts the replays.

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
