"""Pipeline and context parallelism against one process: losses, gradients by name, norms and replicas of whole steps.

Every schedule, alone and with tensor, sequence, context and data parallelism; adapters, and everything trained; tied
embeddings across the pipeline's ends; layers below the first trainable one; uneven splits of layers and of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from engine.batch import Batch
from engine.data.collate import context_part
from engine.distributed.mesh import Axis, Mesh, build_mesh, single_process_mesh
from engine.distributed.ranks import RankGrid
from engine.distributed.sharding import ShardSpec
from engine.layers.context import TensorLayout
from engine.models.decoder import Part, build_decoder
from engine.objectives.language_modeling import LanguageModeling
from engine.ops.attention.blocks import REFERENCE_BLOCKS
from engine.ops.attention.context_parallel import Method
from engine.optim.adamw import FlatAdamW
from engine.optim.flat import FlatParameters
from engine.optim.reduce import GradientReducer
from engine.pipeline.schedules import ScheduleChoice, make_schedule
from engine.training.rank_stages import Stages
from engine.training.stage import ModelStage
from engine.training.step import TrainStep
from tests.distributed.cases import Case, cut, make_batch, relative_error, small_config, whole_tensor
from tests.distributed.gradient_table import EVERY_LINEAR
from tests.support.spawning import spawn
from tests.support.sweeps import sampled

pytestmark = pytest.mark.distributed

NUM_STEPS = 4
COMPARED = 2
"""The step, from 1, whose gradients are compared."""
ACCUMULATION = 4
GLOBAL_ROWS = 8
CPU = torch.device("cpu")

FOUR = small_config(num_layers=4)
CASES = {
    "adapters": Case(config=FOUR, adapters=EVERY_LINEAR),
    "upper adapters": Case(config=FOUR, adapters=r"layers\.[23]\..*_proj"),
    "everything": Case(config=FOUR, trained=".*"),
    "tied": Case(config=replace(FOUR, tied_embeddings=True), trained=".*"),
    "tied, frozen": Case(config=replace(FOUR, tied_embeddings=True), adapters=r"layers\..*_proj"),
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the ranks are used, and for what.

    Args:
        layers: of each stage.
        first: the first trainable stage.
        length: of the rows.
    """

    case: str
    grid: RankGrid
    schedule: str = "1f1b"
    layers: tuple[int, ...] = (4,)
    first: int = 0
    sequence: bool = False
    method: Method = "ring"
    length: int = 24


LAYOUTS = {
    "pp2": Layout(case="adapters", grid=RankGrid(pp=2), layers=(2, 2)),
    "pp2 interleaved": Layout(case="adapters", grid=RankGrid(pp=2), schedule="lora", layers=(1, 1, 1, 1)),
    "pp2 upper": Layout(case="upper adapters", grid=RankGrid(pp=2), layers=(1, 3), first=1),
    "pp2 upper, interleaved": Layout(
        case="upper adapters", grid=RankGrid(pp=2), schedule="interleaved", layers=(1, 1, 1, 1), first=2
    ),
    "pp2 zb_h1": Layout(case="everything", grid=RankGrid(pp=2), schedule="zb_h1", layers=(3, 1)),
    "pp2 zb_v": Layout(case="everything", grid=RankGrid(pp=2), schedule="zb_v", layers=(1, 1, 1, 1)),
    "pp2 tied": Layout(case="tied", grid=RankGrid(pp=2), layers=(2, 2)),
    "pp2 tied, interleaved": Layout(case="tied", grid=RankGrid(pp=2), schedule="interleaved", layers=(1, 1, 1, 1)),
    "pp2 tied, zb_v": Layout(case="tied", grid=RankGrid(pp=2), schedule="zb_v", layers=(1, 1, 1, 1)),
    "pp2 tied, frozen": Layout(case="tied, frozen", grid=RankGrid(pp=2), layers=(2, 2)),
    "cp2 ring": Layout(case="adapters", grid=RankGrid(cp=2)),
    "cp2 ulysses": Layout(case="adapters", grid=RankGrid(cp=2), method="ulysses"),
    "cp2 ring, odd": Layout(case="everything", grid=RankGrid(cp=2), length=23),
    "cp2 ulysses, odd": Layout(case="everything", grid=RankGrid(cp=2), method="ulysses", length=23),
    "pp4": Layout(case="adapters", grid=RankGrid(pp=4), layers=(1, 1, 1, 1)),
    "pp4 tied": Layout(case="tied", grid=RankGrid(pp=4), layers=(1, 1, 1, 1)),
    "tp2 sequence pp2": Layout(case="adapters", grid=RankGrid(tp=2, pp=2), layers=(2, 2), sequence=True),
    "tp2 pp2 tied": Layout(case="tied", grid=RankGrid(tp=2, pp=2), layers=(2, 2)),
    "pp2 dp2": Layout(case="adapters", grid=RankGrid(pp=2, dp=2), schedule="lora", layers=(1, 1, 1, 1)),
    "pp2 cp2": Layout(case="adapters", grid=RankGrid(pp=2, cp=2), layers=(2, 2)),
    "tp2 sequence cp2": Layout(case="adapters", grid=RankGrid(tp=2, cp=2), sequence=True),
    "tp2 cp2 ulysses": Layout(case="adapters", grid=RankGrid(tp=2, cp=2), method="ulysses", length=23),
    "cp2 dp2": Layout(case="everything", grid=RankGrid(cp=2, dp=2)),
    "cp4": Layout(case="adapters", grid=RankGrid(cp=4), length=23),
    "tp2 sequence pp2 dp2": Layout(
        case="adapters", grid=RankGrid(tp=2, pp=2, dp=2), schedule="lora", layers=(1, 1, 1, 1), sequence=True
    ),
    "tp2 sequence pp2 dp2, tied": Layout(
        case="tied", grid=RankGrid(tp=2, pp=2, dp=2), schedule="zb_h1", layers=(2, 2), sequence=True
    ),
    "tp2 sequence pp2 cp2": Layout(case="everything", grid=RankGrid(tp=2, pp=2, cp=2), layers=(3, 1), sequence=True),
    "pp2 cp2 dp2 ulysses": Layout(
        case="everything", grid=RankGrid(pp=2, cp=2, dp=2), schedule="zb_v", layers=(1, 1, 1, 1), method="ulysses"
    ),
}
QUICK = (
    "pp2 interleaved", "pp2 zb_h1", "pp2 tied, zb_v", "cp2 ring, odd",
    "cp2 ulysses", "tp2 sequence pp2", "pp2 dp2", "tp2 cp2 ulysses",
)  # fmt: skip
"""Every schedule, both ways of context parallelism, and each axis beside another."""


class Trained(NamedTuple):
    """What one rank saw in its run."""

    losses: list[float]
    norms: list[float]
    evaluation: float
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    specs: dict[str, ShardSpec]
    executed: tuple[str, ...]


class RecordedStage(ModelStage):
    """Writes down what it is asked to do."""

    number: int
    executed: list[str]

    def forward(self, microbatch: int, activation: Tensor | None = None) -> Tensor | None:
        self.executed.append(f"{self.number}F{microbatch}")
        return super().forward(microbatch, activation)

    def backward(
        self, microbatch: int, gradient: Tensor | None = None, *, defer_weights: bool = False
    ) -> Tensor | None:
        self.executed.append(f"{self.number}{'I' if defer_weights else 'B'}{microbatch}")
        return super().backward(microbatch, gradient, defer_weights=defer_weights)

    def weight_gradients(self, microbatch: int) -> None:
        self.executed.append(f"{self.number}W{microbatch}")
        super().weight_gradients(microbatch)


class Run:
    """A case in a layout on this rank."""

    def __init__(self, layout: Layout, mesh: Mesh) -> None:
        case = CASES[layout.case]
        self.layout, self.mesh = layout, mesh
        virtual = len(layout.layers) // mesh.pp.size
        choice = ScheduleChoice(
            name=layout.schedule, num_ranks=mesh.pp.size, virtual=virtual, first_trainable_stage=layout.first
        )
        stage_rank = choice.schedule(ACCUMULATION).stage_rank
        tensors = TensorLayout(
            tp=mesh.tp, kv_replica=mesh.kv_replica, sequence_parallel=layout.sequence, cp=mesh.cp,
            pp_ends=Axis("pp_ends") if stage_rank[0] == stage_rank[-1] else mesh.pp_ends,
            context_method=layout.method, attention_blocks=REFERENCE_BLOCKS,
        )  # fmt: skip
        self.executed: list[str] = []
        stages: dict[int, RecordedStage] = {}
        step = torch.zeros((), dtype=torch.int64)
        embedding = None
        for number, part in _parts(layout.layers):
            if stage_rank[number] != mesh.pp.rank:
                continue
            model = build_decoder(
                case.config, layout=tensors, plan=case.plan(), device=CPU, dtype=torch.float32, part=part,
                embedding_weight=embedding,
            )  # fmt: skip
            embedding = model.embedding.weight if model.embedding is not None else embedding
            stages[number] = RecordedStage(
                model, LanguageModeling(), CPU, trains=number >= layout.first, gives_gradient=number > layout.first,
                step=step,
            )  # fmt: skip
            stages[number].number, stages[number].executed = number, self.executed
        self.stages = Stages(stages, mesh.pp, choice)
        for entry in self.stages.entries():
            entry.parameter.data.copy_(cut(whole_tensor(entry.name, entry.spec.global_shape), entry.spec))
        self.flat = FlatParameters(self.stages.entries(), CPU)
        optimizer = FlatAdamW(
            self.flat, mesh, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01, clip_grad_norm=0.5
        )  # fmt: skip
        self.step = TrainStep(self.stages, GradientReducer(self.flat, mesh, bucket_bytes=2048), optimizer, mesh)

    def batches(self, step: int) -> tuple[list[Batch], float]:
        """This rank's micro-batches, and the targets of the global batch."""
        mesh, length = self.mesh, self.layout.length
        size = GLOBAL_ROWS // ACCUMULATION
        share = size // mesh.dp.size
        common = {"row_length": length, "seq_length": 24, "vocab_size": FOUR.vocab_size, "seed": step}
        mine, total = [], 0.0
        for index in range(ACCUMULATION):
            rows = [(slot, _documents(step, slot, length)) for slot in range(index * size, (index + 1) * size)]
            total += float(make_batch(rows, **common).loss_weights_BS.sum())
            whole = make_batch(rows[mesh.dp.rank * share : (mesh.dp.rank + 1) * share], **common)
            mine.append(context_part(whole, size=mesh.cp.size, rank=mesh.cp.rank))
        return mine, total

    def train(self) -> Trained:
        losses, norms, gradients = [], [], {}
        for step in range(1, NUM_STEPS + 1):
            batches, targets = self.batches(step)
            self.executed.clear()
            if step == COMPARED:
                self.step.gradients(batches, targets)
                gradients = {slot.entry.name: slot.view(self.flat.gradient).clone() for slot in self.flat.slots}
                self.flat.gradient.zero_()
            result = self.step(batches, targets, 1e-3)
            losses.append(result.loss.item())
            norms.append(result.grad_norm.item())
        parameters = {slot.entry.name: slot.entry.parameter.data.clone() for slot in self.flat.slots}
        specs = {slot.entry.name: slot.entry.spec for slot in self.flat.slots}
        executed = tuple(self.executed)
        evaluation = self.stages.figures(self.batches(9)[0][:3])[0]
        return Trained(losses, norms, evaluation.item(), gradients, parameters, specs, executed)


def _parts(layers: tuple[int, ...]) -> Iterator[tuple[int, Part]]:
    first = 0
    for stage, count in enumerate(layers):
        yield stage, Part(first=first, last=first + count, embedding=stage == 0, head=stage == len(layers) - 1)
        first += count


def _documents(step: int, slot: int, length: int) -> tuple[int, ...]:
    return ((9, 1, length - 10), (length,), (5, 5, length - 10), (length - 3,))[(slot + step) % 4]


def _train_all(names: list[str]) -> dict[str, Trained]:
    results = {}
    for name in names:
        layout = LAYOUTS[name]
        mesh = build_mesh(layout.grid, device_type="cpu", num_kv_heads=FOUR.num_kv_heads)
        results[name] = Run(layout, mesh).train()
    return results


@functools.cache
def _ranks(world: int, quick: bool) -> list[dict[str, Trained]]:
    names = [name for name, layout in LAYOUTS.items() if layout.grid.world_size == world and (name in QUICK) == quick]
    return spawn(_train_all, world=world, args=(names,), timeout=240)


def _of(name: str) -> list[Trained]:
    return [rank[name] for rank in _ranks(LAYOUTS[name].grid.world_size, name in QUICK)]


@functools.cache
def _plain(case: str, length: int) -> Trained:
    return Run(Layout(case=case, grid=RankGrid(), length=length), single_process_mesh()).train()


def _alone(name: str) -> Trained:
    return _plain(LAYOUTS[name].case, LAYOUTS[name].length)


every_layout = pytest.mark.parametrize("name", sampled(LAYOUTS, QUICK))


@every_layout
def test_losses_and_norms(name: str) -> None:
    alone = _alone(name)
    assert alone.losses[-1] != alone.losses[0] and min(alone.norms) > 0.5, "nothing was learnt, or nothing clipped"
    for rank in _of(name):
        torch.testing.assert_close(torch.tensor(rank.losses), torch.tensor(alone.losses), rtol=0, atol=1e-5)
        torch.testing.assert_close(torch.tensor(rank.norms), torch.tensor(alone.norms), rtol=1e-5, atol=0)


@every_layout
def test_evaluation_loss(name: str) -> None:
    """Without dropout, summed over the data and context ranks, and known to every pipeline rank."""
    layout, ranks = LAYOUTS[name], _of(name)
    grid = layout.grid
    for pp in range(grid.pp):
        total = sum(ranks[grid.rank(pp=pp, dp=dp, cp=cp)].evaluation for dp in range(grid.dp) for cp in range(grid.cp))
        assert total == pytest.approx(_alone(name).evaluation, rel=1e-5)


@every_layout
def test_gradients_by_name(name: str) -> None:
    expected = _alone(name).gradients
    held = set()
    for place, rank in enumerate(_of(name)):
        held |= rank.gradients.keys()
        slices = {key: cut(expected[key], rank.specs[key]) for key in rank.gradients}
        errors = {
            key: relative_error(rank.gradients[key], part) if part.any() else float(rank.gradients[key].abs().max())
            for key, part in slices.items()
        }
        wrong = {key: error for key, error in errors.items() if error >= 1e-5}
        assert not wrong, f"rank {place}: {wrong}"
    assert held == expected.keys()


@every_layout
def test_replicas_stay_bitwise_equal(name: str) -> None:
    held: dict[tuple[str, object], Tensor] = {}
    for rank in _of(name):
        for key, value in rank.parameters.items():
            assert torch.equal(held.setdefault((key, rank.specs[key].pieces), value), value), key


@every_layout
def test_executed_order_is_the_schedules(name: str) -> None:
    layout = LAYOUTS[name]
    virtual = len(layout.layers) // layout.grid.pp
    schedule = make_schedule(layout.schedule, layout.grid.pp, virtual, ACCUMULATION, layout.first)
    for place, rank in enumerate(_of(name)):
        actions = schedule.actions[layout.grid.coordinates(place)["pp"]]
        assert rank.executed == tuple(map(str, actions))
