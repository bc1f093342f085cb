"""Tenants of a base that is spread over ranks: each one's adapters are those that it has alone on the same layout."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from engine.api import load_config
from engine.batch import IGNORE_LABEL, Batch
from engine.config.run import RunConfig
from engine.data.collate import context_part
from engine.layers.shared_base import SharedBase
from engine.models.initialise import fill_normal
from engine.objectives.language_modeling import LanguageModeling
from engine.optim.adamw import FlatAdamW
from engine.pipeline.costs import even_costs
from engine.pipeline.schedule import Schedule
from engine.pipeline.schedules import ScheduleChoice
from engine.pipeline.simulate import simulate
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from engine.tenants import joined_batch, joint_pass
from engine.tenants.tenants import Tenants
from engine.training.build import Training, build_training
from engine.training.start import refuse_early
from rankfold.benchmarking.small_run import SMALL_HYBRID, SMALL_LLAMA, write_small_run
from tests.support.small_training import packed_batch
from tests.support.spawning import spawn
from tests.tenants.test_shared_base import HYBRID, SMALLER

pytestmark = pytest.mark.distributed

SIZES = {**SMALLER, "hidden_size": 128, "head_dim": 32, "num_hidden_layers": 4}
"""A tensor rank of two has whole blocks of encoded weights, and a run that trains the last layer alone would have the
others in one stage."""
ADAPTERS: tuple[dict[str, Any], ...] = (
    {"rank": 1, "alpha": 3, "dropout": 0.05, "exclude": ["o_proj"]},
    {"rank": 4, "alpha": 8},
    {"rank": 8, "alpha": 4, "dropout": 0.1, "targets": ["q_proj", "down_proj"]},
    {"rank": 16, "alpha": 3, "targets": ["all-linear", "lm_head"]},
    {"rank": 64, "alpha": 32, "targets": [r"layers\.3\..*"]},
    {"rank": 3, "alpha": 3, "dropout": 0.05, "dora": True, "targets": [r"layers\.[01]\..*"]},
)
"""The rows of the last are its own, which the second of two stages does not see; the one before trains nothing on the
first."""
TOKENS, LR = 150, 1e-2


@dataclass(frozen=True)
class Layout:
    """A layout.

    Args:
        world: ranks.
        parallel, model: sections of the configuration.
        apart: how far the first gradients may be from those of a tenant alone, in the norm of a tensor.
    """

    world: int
    parallel: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    apart: float = 0.0


TP2: dict[str, Any] = {"tensor": 2, "sequence": False}
ADAPTED = 100.0
"""How much further adapters may be after some steps: AdamW divides small gradients by their size."""
ROWS_CUT = 4e-7
"""Sequence parallelism: the gradient of A of a column-parallel linear is the sum of the tensor ranks' sums over the
tokens that each holds, and neighbours change which these are."""
RING = 1e-5
"""Three ranks and more add up a number in an order that depends on its place in what they add up."""
LAYOUTS = {
    "tp2": Layout(2, TP2),
    "tp2 joint": Layout(2, {**TP2, "lora_reduce": "joint"}),
    "tp2 sequence": Layout(2, {"tensor": 2}, apart=ROWS_CUT),
    "pp2": Layout(2, {"pipeline": 2}),
    "pp2 virtual": Layout(2, {"pipeline": 2, "virtual": 2}),
    "pp2 zb_h1": Layout(2, {"pipeline": 2, "schedule": "zb_h1"}),
    "cp2 ring": Layout(2, {"context": 2}),
    "cp2 ulysses": Layout(2, {"context": 2, "context_method": "ulysses"}),
    "dp2": Layout(2),
    "dp2 sharded": Layout(2, {"shard": "gradients"}),
    "tp2 nf4": Layout(2, TP2, {"base_dtype": "nf4"}),
    "pp2 nf4": Layout(2, {"pipeline": 2}, {"base_dtype": "nf4"}),
    "tp2 pp2": Layout(4, {**TP2, "pipeline": 2}),
    "tp2 sequence pp2": Layout(4, {"tensor": 2, "pipeline": 2}, apart=ROWS_CUT),
    "tp2 cp2": Layout(4, {**TP2, "context": 2}),
    "pp2 cp2": Layout(4, {"pipeline": 2, "context": 2}),
    "pp2 dp2": Layout(4, {"pipeline": 2}),
    "tp4": Layout(4, {"tensor": 4, "sequence": False}, apart=RING),
}
QUICK = ("pp2", "tp2 sequence")


class Squares(LanguageModeling):
    """Another loss: squares of the token losses."""

    def loss_sum(self, token_losses_T: Tensor, batch: Batch) -> Tensor:
        return (token_losses_T.square() * batch.loss_weights_BS.flatten()).sum()


def _objective(number: int) -> LanguageModeling | None:
    return Squares() if number % 2 else None


def _write_model(folder: Path) -> None:
    """Writes a model with weights, which runs of any seed share."""
    write_small_run(folder, {**SMALL_LLAMA, **SIZES})
    hidden, inner, heads = SIZES["hidden_size"], SIZES["intermediate_size"], SIZES["head_dim"]
    queries, keys = SIZES["num_attention_heads"] * heads, SIZES["num_key_value_heads"] * heads
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    layers = range(SIZES["num_hidden_layers"])
    named = {f"model.layers.{layer}.{name}.weight": shape for layer in layers for name, shape in shapes.items()}
    table = (SIZES["vocab_size"], hidden)
    named |= {"model.embed_tokens.weight": table, "model.norm.weight": (hidden,), "lm_head.weight": table}
    draw = torch.Generator().manual_seed(3)
    weights = {
        name: torch.randn(shape, generator=draw) * 0.15 if len(shape) == 2 else torch.ones(shape)
        for name, shape in named.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _configs(folder: Path, layout: Layout) -> dict[int, RunConfig]:
    return {
        number: load_config(
            {
                "model": {"path": str(folder), **layout.model},
                "lora": adapter,
                "parallel": layout.parallel,
                "data": {"train": str(folder / "train.jsonl"), "format": "text", "seq_length": 64},
                "train": {"steps": 1, "seed": 5 + number, "global_batch_size": 2},
            }
        )
        for number, adapter in enumerate(ADAPTERS)
        if not (adapter.get("dora") and layout.model)  # nobody has the lengths of encoded rows
    }


def _whole(number: int, step: int, data: int, odd: int) -> list[Batch]:
    """Returns the micro-batches of a data rank: the second has one less, and of the first tenant none.

    Args:
        odd: tokens that the last one has more; with 1 the parts of context ranks differ.
    """
    seed = 1000 * data + 100 * number + 10 * step
    batches = [
        packed_batch([(9 + 2 * number, 15 - 2 * number), (4, 20)], SIZES["vocab_size"], seed),
        packed_batch([(5, 7 + odd + 4 * number)], SIZES["vocab_size"], seed + 1),
    ]
    return batches if not data else batches[: number and 1]


def _without_loss() -> Batch:
    found = packed_batch([(8,)], SIZES["vocab_size"], 0)
    return found.map(lambda one: one.fill_(IGNORE_LABEL) if one is found.labels_BS else one).map(
        lambda one: one.zero_() if one.is_floating_point() else one
    )


def _batches(training: Training, number: int, step: int) -> tuple[list[Batch], float]:
    """Returns this rank's micro-batches of a step, and the targets of all ranks."""
    mesh = training.mesh
    whole = [_whole(number, step, data, mesh.cp.size - 1) for data in range(mesh.dp.size)]
    everywhere = [one for own in whole for one in own]
    own = [context_part(one, size=mesh.cp.size, rank=mesh.cp.rank) for one in whole[mesh.dp.rank]]
    return own, float(sum(one.loss_weights_BS.sum() for one in everywhere))


def _draw_b(training: Training, number: int) -> None:
    for entry in training.stages.entries():
        if entry.name.endswith("lora_B"):
            fill_normal(entry.shard, 0.05, number)
    training.optimizer.flat._start_from_parameters()


def _trained(training: Training) -> dict[str, Tensor]:
    training.optimizer.flat.finish_publish()
    return {entry.name: entry.parameter.data.clone() for entry in training.stages.entries() if entry.sink is not None}


def _frozen(training: Training) -> dict[str, int]:
    return {entry.name: entry.parameter.data_ptr() for entry in training.stages.entries() if entry.sink is None}


def _held_bytes() -> int:
    """Returns the memory of all tensors of this process."""
    gc.collect()
    storages = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for one in gc.get_objects()
        if type(one) in (Tensor, torch.nn.Parameter) and one.device.type == "cpu"
    }
    return sum(storages.values())


class Trained(NamedTuple):
    """What runs came to on this rank.

    Args:
        adapters: of each.
        gradients: of the first step of each, summed over ranks; empty where these keep parts of them.
        parts: of each joined micro-batch.
        idle: slots of all pipeline ranks without work in a step, a slot being a forward or backward of a stage.
    """

    adapters: dict[int, dict[str, Tensor]]
    gradients: dict[int, dict[str, Tensor]]
    parts: list[int]
    idle: int


class Watch:
    """Keeps what runs do meanwhile."""

    def __init__(self) -> None:
        self.parts: list[int] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.idle = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        join, schedule, step = joined_batch.join, ScheduleChoice.schedule, FlatAdamW.step

        def watched_join(given: Sequence[tuple[int, Batch]]) -> Batch:
            self.parts.append(len(given))
            return join(given)

        def watched_schedule(choice: ScheduleChoice, count: int, *, training: bool = True) -> Schedule:
            made = schedule(choice, count, training=training)
            found = simulate(made, even_costs(made.num_stages))
            self.idle += round(sum(found.makespan - busy for busy in found.busy))
            return made

        def watched_step(optimizer: FlatAdamW, *given: Any) -> Tensor:
            flat = optimizer.flat
            slots = () if flat.is_sharded else flat.slots
            self.gradients.append({one.entry.name: one.view(flat.gradient).clone() for one in slots})
            return step(optimizer, *given)

        with (
            mock.patch.object(joint_pass, "join", watched_join),
            mock.patch.object(ScheduleChoice, "schedule", watched_schedule),
            mock.patch.object(FlatAdamW, "step", watched_step),
        ):
            yield


def _together(runs: Mapping[int, RunConfig], launch: Launch, steps: int) -> Trained:
    """Trains tenants of one base."""
    tenants = Tenants(next(iter(runs.values())), launch, Log(1), tokens=TOKENS)
    before, elements = _held_bytes(), 0
    numbers = {number: tenants.add(config, _objective(number)) for number, config in runs.items()}
    for number, own in numbers.items():
        assert _frozen(tenants[own]) == _frozen(tenants.base)
        elements += sum(one.numel() for one in _trained(tenants[own]).values())
        _draw_b(tenants[own], number)
    base = sum(one.nbytes for part in tenants.base.parts for one in part.parameters())
    # of adapters there are weights, masters, gradients and two moments
    assert _held_bytes() - before < 5 * 4 * elements + 0.1 * base
    watch = Watch()
    with watch.watching():  # a schedule is made once for all steps
        for step in range(steps):
            given = {own: _batches(tenants[own], number, step) for number, own in numbers.items()}
            batches = {own: one for own, (one, _) in given.items()}
            for own, loss in tenants.gradients(batches, {own: one for own, (_, one) in given.items()}).items():
                tenants.update(own, LR, loss)
    adapters = {number: _trained(tenants[own]) for number, own in numbers.items()}
    return Trained(adapters, dict(zip(runs, watch.gradients, strict=False)), watch.parts, watch.idle)


def _alone(runs: Mapping[int, RunConfig], launch: Launch, steps: int) -> Trained:
    """Trains one run after the other by its own step, each on a base of its own."""
    adapters, gradients, idle = {}, {}, 0
    for number, config in runs.items():
        source, plan = refuse_early(config, launch)
        training = build_training(config, launch, source, plan, Log(1), objective=_objective(number), base=SharedBase())
        _draw_b(training, number)
        watch = Watch()
        with watch.watching():
            for step in range(steps):
                batches, targets = _batches(training, number, step)
                training.step(batches + [_without_loss()] * (2 - len(batches)), targets, LR)
        adapters[number], gradients[number], idle = _trained(training), watch.gradients[0], idle + watch.idle
    return Trained(adapters, gradients, [], idle)


def _run(folder: str, names: Sequence[str], wanted: Sequence[int], steps: int) -> dict[str, tuple[Trained, Trained]]:
    launch = Launch(rank=dist.get_rank(), world_size=dist.get_world_size(), device=torch.device("cpu"))
    found = {}
    for name in names:
        configs = _configs(Path(folder), LAYOUTS[name])
        runs = {number: configs[number] for number in wanted if number in configs}
        found[name] = _together(runs, launch, steps), _alone(runs, launch, steps)
    return found


def _deviations(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Returns the names of tensors that differ, and how far they are apart in their norm."""
    assert found.keys() == expected.keys()
    differ = {name: one for name, one in found.items() if not torch.equal(one, expected[name])}
    return {name: float((one - expected[name]).norm() / expected[name].norm()) for name, one in differ.items()}


def _sums_over_rows(name: str) -> bool:
    """Whether a gradient is a sum over tokens that sequence parallelism divides."""
    return name.endswith("lora_A") and not any(linear in name for linear in ("o_proj", "down_proj"))


def _check(name: str, ranks: Sequence[tuple[Trained, Trained]]) -> None:
    layout = LAYOUTS[name]
    for together, alone in ranks:
        if "dp" not in name:
            assert max(together.parts) == 4
        for number, adapters in together.adapters.items():
            apart = _deviations(adapters, alone.adapters[number])
            assert all(one <= ADAPTED * layout.apart for one in apart.values()), (name, number, apart)
            first = _deviations(together.gradients[number], alone.gradients[number])
            assert all(one <= layout.apart for one in first.values()), (name, number, first)
            assert layout.apart == RING or all(map(_sums_over_rows, first)), (name, number, first)
        if layout.parallel.get("pipeline"):
            assert 0 < together.idle < alone.idle / 2


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS])
def test_each_trains_as_alone(tmp_path: Path, name: str) -> None:
    _write_model(tmp_path)
    found = spawn(_run, world=LAYOUTS[name].world, args=(str(tmp_path), (name,), range(6), 3), timeout=280)
    _check(name, [one[name] for one in found])


def test_three_train_as_alone(tmp_path: Path) -> None:
    _write_model(tmp_path)
    found = spawn(_run, world=2, args=(str(tmp_path), QUICK, (0, 2, 4), 2))
    for name in QUICK:
        _check(name, [one[name] for one in found])


def _hybrid_gradients(folder: str, name: str) -> list[tuple[Tensor, Tensor]]:
    """Returns the gradients of three tenants, each with what it has alone; their states go through context ranks."""
    launch = Launch(rank=dist.get_rank(), world_size=2, device=torch.device("cpu"))
    runs = {
        number: replace(one, model=replace(one.model, init="random"), train=replace(one.train, seed=5))
        for number, one in _configs(Path(folder), LAYOUTS[name]).items()
        if number < 3
    }
    tenants = Tenants(runs[0], launch, Log(1), tokens=TOKENS)
    given = {}
    for number, config in runs.items():
        own = tenants.add(config)
        _draw_b(tenants[own], number)
        given[own] = _batches(tenants[own], number, 0)[0][:1]

    def gradients(some: Sequence[int]) -> list[Tensor]:
        tenants.gradients({own: given[own] for own in some}, dict.fromkeys(some, 20.0))
        found = []
        for own in some:
            tenants[own].reducer.finish()
            found.append(tenants[own].optimizer.flat.gradient.clone())
            tenants[own].optimizer.flat.gradient.zero_()
        return found

    return list(zip(gradients(list(given)), [gradients([own])[0] for own in given], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cp2 ring", "tp2", "tp2 sequence", "pp2"])
def test_neighbours_of_a_hybrid(tmp_path: Path, name: str) -> None:
    """Its compiled kernels add up in an order that depends on the place of a row."""
    write_small_run(tmp_path, {**SMALL_HYBRID, **HYBRID, **SMALLER})
    for rank in spawn(_hybrid_gradients, world=2, args=(str(tmp_path), name)):
        for together, alone in rank:
            assert alone.norm() > 0 and (together - alone).norm() < 1e-6 * alone.norm()


def test_tenants_fill_the_pipeline() -> None:
    """Idle slots of all ranks: of one schedule of ten micro-batches, and of five with two each."""

    def idle(micro_batches: int) -> float:
        schedule = ScheduleChoice(name="lora", num_ranks=4).schedule(micro_batches)
        found = simulate(schedule, even_costs(4))
        return sum(found.makespan - busy for busy in found.busy)

    assert idle(10) == 24 and 5 * idle(2) == 120
