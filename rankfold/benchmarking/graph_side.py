"""The three kinds of step that section `graph` compares, on one model, and the packed rows that they train on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.batch import Batch
from engine.data.collate import pin
from engine.distributed.mesh import single_process_mesh
from engine.layers.graph_capture import Capture
from engine.objectives.language_modeling import LanguageModeling
from engine.ops.kernels import Kernels
from engine.optim.adamw import FlatAdamW
from engine.optim.flat import FlatParameters
from engine.optim.reduce import GradientReducer
from engine.training.cuda_graph.static_batch import DOCUMENTS_PER_ROW, StaticShape
from engine.training.cuda_graph.step_graph import LayerGraphs, StepGraph
from engine.training.rank_stages import Stages
from engine.training.stage import ModelStage
from engine.training.step import StepResult, TrainStep
from rankfold.benchmarking.engine_side import EngineSide
from rankfold.benchmarking.model import ADAMW, CLIP_GRAD_NORM, mixed_lengths, packed_batch
from rankfold.benchmarking.sections import GraphOptions

EAGER, LAYERS, STEP = "no graph", "graphs of layers", "graph of the step"
_NUM_STEPS = 4


class GraphSide:
    """The model, its optimizer, and a step of each kind on them.

    Args:
        options: with the row length to be measured as `length`.
        device: where it runs.
        kernels: whose attention reads the documents on the device.
        make_capture: a capture for this side; None for the step without graphs alone.
    """

    def __init__(
        self,
        options: GraphOptions,
        device: torch.device,
        kernels: Kernels,
        make_capture: Callable[[GraphSide], Capture] | None,
    ) -> None:
        self.device = device
        side = EngineSide(options, device, kernels)
        self.model, mesh = side.model, single_process_mesh()
        self.flat = FlatParameters(side.entries, device)
        side.fill(self.flat.master_shards())
        self.flat.publish()
        self.optimizer = FlatAdamW(self.flat, mesh, **ADAMW, clip_grad_norm=CLIP_GRAD_NORM)
        reducer = GradientReducer(self.flat, mesh, bucket_bytes=2**25)
        self.count = torch.zeros((), dtype=torch.int64, device=device)

        def step() -> tuple[TrainStep, Stages]:
            # a stage whose layers are replayed cannot run otherwise, so the two do not share one
            stages = Stages.whole(ModelStage(self.model, LanguageModeling(), device, step=self.count))
            return TrainStep(stages, reducer, self.optimizer, mesh), stages

        plain, _ = step()
        self.kinds: dict[str, Callable[..., StepResult]] = {EAGER: plain}
        if make_capture is not None:
            layered, stages = step()
            room = options.rows * max(options.documents, DOCUMENTS_PER_ROW)
            shape = StaticShape(rows=options.rows, length=options.length, documents=room)
            capture = make_capture(self)
            self.kinds[LAYERS] = LayerGraphs(layered, stages, capture, shape)
            self.kinds[STEP] = StepGraph(plain, capture, shape, num_microbatches=options.accumulation, device=device)
        self._kept = [(tensor, tensor.clone()) for tensor in (*self.lasting(), self.count)]

    def lasting(self) -> list[Tensor]:
        """Returns the state that a step changes, without gradients."""
        optimizer = self.optimizer
        return [self.flat.master, optimizer.exp_avg, optimizer.exp_avg_sq, optimizer.step_count, optimizer.skipped]

    def restore(self) -> None:
        """Restores the initial state."""
        for tensor, value in self._kept:
            tensor.copy_(value)
        self.flat.publish()


def make_steps(options: GraphOptions, device: torch.device) -> list[tuple[list[Batch], float]]:
    """Returns the micro-batches of some steps, each packed differently, and their numbers of targets."""
    steps = []
    for seed in range(_NUM_STEPS):
        batches = [make_batch(options, seed * options.accumulation + micro) for micro in range(options.accumulation)]
        targets = float(sum(batch.loss_weights_BS.sum() for batch in batches))
        steps.append(([pin(batch) if device.type == "cuda" else batch for batch in batches], targets))
    return steps


def make_batch(options: GraphOptions, seed: int) -> Batch:
    rows, length = options.rows, options.length
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    for _ in range(rows):
        lengths += mixed_lengths(length, options.documents, generator)
    return packed_batch(torch.randint(options.vocab, (rows, length), generator=generator), lengths)
