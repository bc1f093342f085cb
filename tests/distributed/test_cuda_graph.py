"""Graphs on several ranks against the same ranks without: the same bits in losses, norms and what training leaves.

Layers are replayed under pipelines, where several micro-batches of a stage are alive at once, and under tensor and data
parallelism; whole steps with the collectives of tensor and data parallelism in them. Functions stand in for graphs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from engine.batch import Batch
from engine.distributed.mesh import Axis, Mesh, build_mesh
from engine.distributed.ranks import RankGrid
from engine.layers.context import TensorLayout
from engine.models.decoder import Decoder, Part
from engine.objectives.language_modeling import LanguageModeling
from engine.optim.adamw import FlatAdamW
from engine.optim.flat import FlatParameters
from engine.optim.reduce import GradientReducer
from engine.optim.state_sharding import Sharding
from engine.pipeline.schedules import ScheduleChoice
from engine.training.cuda_graph.counts import WARMUP_STEPS
from engine.training.cuda_graph.static_batch import StaticShape
from engine.training.cuda_graph.step_graph import LayerGraphs, StepGraph
from engine.training.rank_stages import Stages
from engine.training.stage import ModelStage
from engine.training.step import TrainStep
from tests.distributed.cases import Case, cut, make_batch, small_config, whole_tensor
from tests.support.graph_stand_in import FunctionCapture
from tests.support.graph_training import ON_DEVICE
from tests.support.spawning import spawn
from tests.support.sweeps import sampled

pytestmark = pytest.mark.distributed

CPU = torch.device("cpu")
NUM_STEPS, ACCUMULATION, ROWS, LENGTH = WARMUP_STEPS + 4, 4, 2, 24
SHAPE = StaticShape(rows=ROWS, length=LENGTH, documents=6)
PACKINGS = ((24,), (9, 15), (5, 5, 14), (1, 23), (8, 8, 8))
FOUR = small_config(num_layers=4)
ADAPTERS = Case(config=FOUR, adapters=r"layers\..*_proj")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How two ranks are used, and what is graphed.

    Args:
        layers: of each stage.
        first: the first trainable stage.
        odd: one micro-batch has more documents than fit.
    """

    graph: str
    grid: RankGrid
    case: Case = ADAPTERS
    schedule: str = "1f1b"
    layers: tuple[int, ...] = (4,)
    first: int = 0
    shards: bool = False
    odd: bool = True


SEQUENCE = replace(ADAPTERS, sequence_parallel=True)
UPPER = Case(config=FOUR, adapters=r"layers\.[23]\..*_proj")
TIED = Case(config=replace(FOUR, tied_embeddings=True), trained=".*")
LAYOUTS = {
    "layer, pipeline": Layout(graph="layer", grid=RankGrid(pp=2), layers=(2, 2)),
    "layer, interleaved": Layout(graph="layer", grid=RankGrid(pp=2), schedule="lora", layers=(1, 1, 1, 1)),
    "layer, frozen stage": Layout(graph="layer", grid=RankGrid(pp=2), case=UPPER, layers=(1, 3), first=1),
    "layer, tied ends": Layout(graph="layer", grid=RankGrid(pp=2), case=TIED, layers=(1, 3)),
    "layer, data": Layout(graph="layer", grid=RankGrid(dp=2)),
    "layer, sequence": Layout(graph="layer", grid=RankGrid(tp=2), case=SEQUENCE),
    "step, data": Layout(graph="step", grid=RankGrid(dp=2), odd=False),
    "step, sharded optimizer": Layout(graph="step", grid=RankGrid(dp=2), shards=True, odd=False),
    "step, sequence": Layout(graph="step", grid=RankGrid(tp=2), case=SEQUENCE),
    "step, everything over tensor ranks": Layout(graph="step", grid=RankGrid(tp=2), case=TIED),
}
QUICK = ("step, sequence",)


class Training:
    """A layout on this rank."""

    def __init__(self, layout: Layout, mesh: Mesh) -> None:
        case = layout.case
        choice = ScheduleChoice(
            name=layout.schedule,
            num_ranks=mesh.pp.size,
            virtual=len(layout.layers) // mesh.pp.size,
            first_trainable_stage=layout.first,
        )
        stage_rank = choice.schedule(ACCUMULATION).stage_rank
        tensors = TensorLayout(
            tp=mesh.tp, kv_replica=mesh.kv_replica, sequence_parallel=case.sequence_parallel, kernels=ON_DEVICE,
            pp_ends=Axis("pp_ends") if stage_rank[0] == stage_rank[-1] else mesh.pp_ends,
        )  # fmt: skip
        stages: dict[int, ModelStage] = {}
        step, first = torch.zeros((), dtype=torch.int64), 0
        for number, count in enumerate(layout.layers):
            ends = {"embedding": number == 0, "head": number == len(layout.layers) - 1}
            part, first = Part(first=first, last=first + count, **ends), first + count
            if stage_rank[number] != mesh.pp.rank:
                continue
            model = Decoder(
                case.config, layout=tensors, plan=case.plan(), device=CPU, dtype=torch.float32, part=part
            )  # fmt: skip
            stages[number] = ModelStage(
                model, LanguageModeling(), CPU, trains=number >= layout.first, gives_gradient=number > layout.first,
                step=step,
            )  # fmt: skip
        self.stages = Stages(stages, mesh.pp, choice)
        for entry in self.stages.entries():
            entry.parameter.data.copy_(cut(whole_tensor(entry.name, entry.spec.global_shape), entry.spec))
        sharding = Sharding(level="optimizer", axis=mesh.dp_cp, bucket_elements=512) if layout.shards else Sharding()
        self.flat = FlatParameters(self.stages.entries(), CPU, sharding=sharding)
        self.optimizer = FlatAdamW(
            self.flat, mesh, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01, clip_grad_norm=0.5
        )  # fmt: skip
        self.step = TrainStep(self.stages, GradientReducer(self.flat, mesh, bucket_bytes=2048), self.optimizer, mesh)

    def lasting(self) -> list[Tensor]:
        optimizer = self.optimizer
        return [
            self.flat.gradient, self.flat.master, optimizer.exp_avg, optimizer.exp_avg_sq, optimizer.step_count,
            optimizer.lr, optimizer.skip, optimizer.skipped, self.stages.step,
            *(entry.parameter.data for entry in self.stages.entries()),
        ]  # fmt: skip


def _batches(layout: Layout, mesh: Mesh, step: int) -> tuple[list[Batch], float]:
    """This rank's micro-batches, and the targets of the global batch."""
    mine, total, size = [], 0.0, mesh.dp.size
    for micro in range(ACCUMULATION):
        for rank in range(size):
            slots = range((micro * size + rank) * ROWS, (micro * size + rank + 1) * ROWS)
            rows = [(slot, PACKINGS[(slot + step * (slot % 3 + 1)) % len(PACKINGS)]) for slot in slots]
            if layout.odd and (step, micro) == (NUM_STEPS - 1, 2):
                rows = [(slot, (4, 4, 4, 12)) for slot in slots]
            batch = make_batch(
                rows, row_length=LENGTH, seq_length=LENGTH, vocab_size=FOUR.vocab_size, seed=step
            )  # fmt: skip
            total += float(batch.loss_weights_BS.sum())
            if rank == mesh.dp.rank:
                mine.append(batch)
    return mine, total


def _train(layout: Layout, mesh: Mesh, *, graphed: bool) -> tuple[list[Tensor], tuple[int, int] | None]:
    training = Training(layout, mesh)
    take, counts = training.step, None
    if graphed:
        capture = FunctionCapture(training.lasting)
        if layout.graph == "layer":
            take = LayerGraphs(training.step, training.stages, capture, SHAPE)
        else:
            take = StepGraph(training.step, capture, SHAPE, num_microbatches=ACCUMULATION, device=CPU)
    results = [take(*_batches(layout, mesh, step), 1e-3 * (step % 2 + 1)) for step in range(NUM_STEPS)]
    if graphed:
        counts = take.counts.replayed, take.counts.beside
    return [
        torch.stack([torch.cat([figure.flatten() for figure in result]) for result in results]),
        *training.lasting(),
    ], counts


def _on_rank(names: list[str]) -> dict[str, tuple[list[bool], tuple[int, int] | None]]:
    results = {}
    for name in names:
        layout = LAYOUTS[name]
        mesh = build_mesh(layout.grid, device_type="cpu", num_kv_heads=FOUR.num_kv_heads)
        expected, _ = _train(layout, mesh, graphed=False)
        found, counts = _train(layout, mesh, graphed=True)
        assert expected[0].isfinite().all() and expected[0][-1, 0] != expected[0][0, 0]
        results[name] = [torch.equal(*pair) for pair in zip(found, expected, strict=True)], counts
    return results


@functools.cache
def _ranks(quick: bool) -> list[dict[str, tuple[list[bool], tuple[int, int] | None]]]:
    return spawn(_on_rank, world=2, args=([name for name in LAYOUTS if (name in QUICK) == quick],), timeout=240)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sampled(LAYOUTS, QUICK))
def test_ranks_with_graphs_have_the_bits_of_ranks_without(name: str) -> None:
    layout = LAYOUTS[name]
    for rank in _ranks(name in QUICK):
        equal, counts = rank[name]
        assert all(equal), equal
        beside = int(layout.odd)
        replayed = NUM_STEPS - WARMUP_STEPS if layout.graph == "step" else (NUM_STEPS - WARMUP_STEPS) * ACCUMULATION
        assert counts == (replayed - beside, beside)
