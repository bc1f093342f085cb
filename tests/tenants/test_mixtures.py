"""Tenants of mixtures of experts: rows that routers send to one expert are multiplied together, whosever they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

import pytest
import torch
import torch.distributed as dist

from engine.batch import Batch
from engine.config.parallel import ParallelOptions
from engine.distributed.sharding import shard_of
from engine.experts.layers import routed_experts
from engine.experts.layers.routed_experts import RoutedMLP
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from engine.tenants import joined_batch, joint_pass, tenants
from engine.tenants.tenants import Tenants
from rankfold.benchmarking.small_run import write_small_run
from tests.support.family_models import make_model
from tests.support.family_table import ROUTED
from tests.support.small_training import packed_batch
from tests.support.spawning import spawn
from tests.support.sweeps import sampled
from tests.tenants.mixtures import ADAPTERS, APART, MODELS, Together, draw_factors
from tests.tenants.test_shared_base import configs, launched

LAYOUTS: list[dict[str, int]] = [
    {"expert": 2},
    {"tensor": 2},
    {"tensor": 2, "expert": 2},
    {"tensor": 2, "expert_tensor": 1},
]
CARRY_A_STATE = ("qwen3 next", "qwen3.5 moe", "granite hybrid moe", "nemotron h", "nemotron h latent", "kimi linear")
CASES = [*((name, {}) for name in MODELS), ("qwen3 moe", {"base_dtype": "nf4"})]


@pytest.mark.parametrize(("name", "model"), sampled(CASES, quick=[("deepseek v3", {})]))
def test_neighbours_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, model: dict[str, Any]
) -> None:
    write_small_run(tmp_path, MODELS[name])
    runs = list(enumerate(configs(tmp_path, (*ADAPTERS, APART), **model)))
    joined: list[list[int]] = []

    def join(parts: Sequence[tuple[int, Batch]]) -> Batch:
        joined.append([number for number, _ in parts])
        return joined_batch.join(parts)

    monkeypatch.setattr(joint_pass, "join", join)
    together = Together(runs).train()
    assert max(map(len, joined)) >= 6 and {number for parts in joined for number in parts} == {0, 1, 2, 3, 4}
    for number, config in runs:
        alone = Together([(number, config)]).train()[number]
        assert alone.keys() == together[number].keys()
        for tensor, expected in alone.items():
            assert torch.equal(together[number][tensor], expected), (number, tensor)


def is_mixture(module: torch.nn.Module) -> TypeGuard[RoutedMLP]:
    return isinstance(module, RoutedMLP)


@pytest.mark.parametrize("name", sampled(MODELS, quick=["qwen2 moe"]))
def test_gradients_are_those_of_its_own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Bit for bit: that model makes the same products."""
    write_small_run(tmp_path, MODELS[name])
    together = Together(list(enumerate(configs(tmp_path, ADAPTERS))))
    flats = [together.tenants[own].optimizer.flat for own in together.numbers.values()]
    for number, own in together.numbers.items():
        together.tenants[own].stages.step.fill_(2 + number)  # a coordinate of dropout masks

    def gradients() -> tuple[list[torch.Tensor], list[list[int]]]:
        counts = []
        for flat in flats:
            flat.gradient.zero_()
        together.add_gradients()
        for own in together.numbers.values():
            mixtures = [one for part in together.tenants[own].parts for one in part.modules() if is_mixture(one)]
            counts += [one.rows_E.tolist() for one in mixtures]
            for one in mixtures:
                one.rows_E.zero_()
        return [flat.gradient.clone() for flat in flats], counts

    joined, rows = gradients()
    monkeypatch.setattr(tenants, "can_join", lambda own: False)
    monkeypatch.setattr(joint_pass, "join", None)
    apart, expected = gradients()
    assert all(map(torch.equal, joined, apart))
    assert rows == expected and all(map(any, rows)), "rows of each expert, which a run's figures tell"


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUTED)
def test_every_family_of_mixtures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A tenant's gradients beside others', alone, and without joined rows; compiled kernels of layers that carry a
    state add up in an order that depends on the place of a row."""
    make_model(name, tmp_path)
    (tmp_path / "train.jsonl").write_text('{"text": "a"}', encoding="utf-8")
    runs = [
        replace(config, model=replace(config.model, init="checkpoint"))
        for config in configs(tmp_path, ({"rank": 4, "alpha": 8}, {**ADAPTERS[2], "rank": 16}, {"rank": 1, "alpha": 3}))
    ]
    given = {
        number: [packed_batch([(3, 2 + number)], 40, number), packed_batch([(4 + number, 2)], 40, 10 + number)]
        for number in range(len(runs))
    }
    together = Tenants(runs[0], launched(), Log(1), tokens=400)
    for number, config in enumerate(runs):
        draw_factors(together[together.add(config)], number)

    def gradients(some: Sequence[int]) -> list[torch.Tensor]:
        for number in some:
            together[number].optimizer.flat.gradient.zero_()
        together.gradients({number: given[number] for number in some}, dict.fromkeys(some, 20.0))
        return [together[number].optimizer.flat.gradient.clone() for number in some]

    found = gradients([*given])
    alone = [gradient for number in given for gradient in gradients([number])]
    monkeypatch.setattr(tenants, "can_join", lambda own: False)
    limit = 1e-6 if name in CARRY_A_STATE else 0.0
    for own, expected, apart in zip(found, alone, gradients([*given]), strict=True):
        assert own.norm() > 0.0
        assert max(float((own - one).norm() / own.norm()) for one in (expected, apart)) <= limit


def test_the_auxiliary_loss_is_of_one_runs_tokens(tmp_path: Path) -> None:
    write_small_run(tmp_path, MODELS["mixtral"])
    plain, other = configs(tmp_path, [ADAPTERS[4], ADAPTERS[0]])
    balanced = replace(plain, train=replace(plain.train, router_aux_loss_coef=0.5))
    together = Together([(0, balanced), (1, other)]).train(2)[0]
    alone, without = Together([(0, balanced)]).train(2)[0], Together([(0, plain)]).train(2)[0]
    for name, tensor in alone.items():
        assert torch.equal(together[name], tensor) and not torch.equal(without[name], tensor), name


def _on_ranks(folder: str, layout: dict[str, int]) -> tuple[dict[int, float], list[str]]:
    """Returns how far each tenant's gradients are from those of one rank, relative to their norm, and what differs
    after steps from what it has alone on these ranks."""
    launch = Launch(rank=dist.get_rank(), world_size=dist.get_world_size(), device=torch.device("cpu"))
    parallel = ParallelOptions(**layout, shard="none")
    runs = [(number, replace(one, parallel=parallel)) for number, one in enumerate(configs(Path(folder), ADAPTERS))]
    rank = launch.rank if parallel.tensor == 1 else None
    expected = torch.load(f"{folder}/gradients.pt")
    far = {}
    for number, found in Together(runs, launch=launch, rank=rank).gradients().items():
        parts = {name: shard_of(expected[number][name], spec) for name, (_, spec) in found.items()}
        distance = sum(float((found[name][0] - part).square().sum()) for name, part in parts.items())
        far[number] = (distance / sum(float(part.square().sum()) for part in parts.values())) ** 0.5
    differ = []
    together = Together(runs, launch=launch, rank=rank).train(2) if parallel.tensor == 1 else {}
    for number in (2,) if together else ():  # which has dropout, and experts that share factors
        found = together[number]
        alone = Together(runs[number : number + 1], launch=launch, rank=rank).train(2)[number]
        assert alone.keys() == found.keys()
        differ += [f"{number}: {name}" for name, tensor in alone.items() if not torch.equal(found[name], tensor)]
    return far, differ


@pytest.mark.distributed
@pytest.mark.parametrize("layout", sampled(LAYOUTS, quick=LAYOUTS[:1]), ids=str)
def test_on_two_ranks(tmp_path: Path, layout: dict[str, int]) -> None:
    """Tensor ranks add up parts of sums which depend on where a tenant's tokens lie; expert ranks do not."""
    write_small_run(tmp_path, MODELS["qwen2 moe"])
    one_rank = Together(list(enumerate(configs(tmp_path, ADAPTERS))), rank=None).gradients()
    torch.save(
        {n: {name: one for name, (one, _) in own.items()} for n, own in one_rank.items()}, tmp_path / "gradients.pt"
    )
    for far, differ in spawn(_on_ranks, world=2, args=(str(tmp_path), layout)):
        assert far.keys() == one_rank.keys() and max(far.values()) < 1e-6, far
        assert not differ, differ


@pytest.mark.parametrize("name", sampled(MODELS, quick=["mixtral"]))
def test_products_of_a_device_that_reads_the_groups_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As on a GPU, the host does not know how many rows an expert has."""
    write_small_run(tmp_path, MODELS[name])
    runs = list(enumerate(configs(tmp_path, ADAPTERS)))
    looped = Together(runs).gradients()
    monkeypatch.setattr(routed_experts, "is_gpu", lambda build: True)
    far = []
    for number, own in Together(runs).gradients().items():
        found = torch.cat([one.flatten() for one, _ in own.values()])
        expected = torch.cat([looped[number][tensor][0].flatten() for tensor in own])
        far.append(float((found - expected).norm() / expected.norm()))
    assert 0.0 < max(far) < 1e-6, far
