"""Runs whose frozen weights, or whose masters and moments, wait in host memory: the bits of the run without.

On a CPU the host's memory is the device's, and the same code copies from one to the other.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch

from engine.distributed.mesh import build_mesh, single_process_mesh
from engine.distributed.ranks import RankGrid
from engine.distributed.sharding import NamedShard
from engine.kernels.native.loader import native_status
from engine.layers import host_storage
from engine.layers.encoded_storage import encoded_entries
from engine.layers.host_storage import HostFetch
from engine.layers.module import shard_entries
from engine.optim.backends import NATIVE, TORCH
from engine.optim.state_sharding import ShardLevel
from tests.distributed.run_cases import SMALL
from tests.distributed.sharded_runs import Layout, Run, assemble
from tests.support.spawning import spawn
from tests.support.sweeps import sampled

NUM_STEPS = 4
ONE = RankGrid()
LAYOUTS = {
    "adapters": Layout(case="adapters", grid=ONE),
    "everything": Layout(case="everything", grid=ONE, accumulation=1),
    "tied": Layout(case="tied", grid=ONE),
    "upper adapters": Layout(case="upper adapters", grid=ONE, accumulation=4),
    "head and adapters": Layout(case="head and adapters", grid=ONE, recompute="none"),
    "bfloat16": Layout(case="head and adapters", grid=ONE, dtype=torch.bfloat16),
    "attention again": Layout(case="adapters", grid=ONE, recompute="attention"),
    "kept in bfloat16": Layout(case="deep, adapters", grid=ONE, layers=(4,), stored=torch.bfloat16),
    "all again": Layout(case="deep, adapters", grid=ONE, layers=(4,), recompute="full"),
    "tp2": Layout(case="adapters", grid=RankGrid(tp=2), sequence=True),
    "dp2": Layout(case="head and adapters", grid=RankGrid(dp=2)),
    "pp2": Layout(case="adapters", grid=RankGrid(pp=2), layers=(1, 1)),
    "pp2, zb_v": Layout(case="deep, tied", grid=RankGrid(pp=2), layers=(1, 1, 1, 1), schedule="zb_v", accumulation=4),
    "cp2": Layout(case="adapters", grid=RankGrid(cp=2), recompute="full"),
    "experts": Layout(case="four experts, adapters", grid=ONE),
    "experts in nf4": Layout(case="routed blocks, adapters", grid=ONE, base="nf4"),
    "ep2 of dp2, experts": Layout(case="four experts, adapters", grid=RankGrid(dp=2, ep=2), recompute="full"),
    "ep2 of dp2, experts in nf4": Layout(case="routed blocks, adapters", grid=RankGrid(dp=2, ep=2), base="nf4"),
    "ep2 of tp2, sequence, experts": Layout(
        case="four experts, shared outer", grid=RankGrid(tp=2, ep=2, shards_experts=False), sequence=True
    ),
}
QUICK = (
    "adapters", "tied", "upper adapters", "bfloat16", "attention again", "kept in bfloat16", "all again", "tp2", "dp2",
    "experts", "ep2 of dp2, experts in nf4",
)  # fmt: skip
LEVELS: dict[str, tuple[ShardLevel, ...]] = {"dp2": ("none", "optimizer", "gradients", "parameters")}
OFFLOADS = {"weights": (True, False), "optimizer": (False, True), "both": (True, True)}


class Outcome(NamedTuple):
    """What is compared."""

    losses: list[float]
    norms: list[float]
    evaluation: float
    state: list[NamedShard]
    weights: list[NamedShard]
    held: int
    """Frozen weights in host memory, in bytes."""


def _outcome(layout: Layout, level: ShardLevel, weights: bool, optimizer: bool) -> Outcome:
    one = layout.grid.world_size == 1
    mesh = single_process_mesh() if one else build_mesh(layout.grid, device_type="cpu", num_kv_heads=SMALL.num_kv_heads)
    backend = NATIVE if native_status().available else TORCH
    run = Run(layout, mesh, level, offload_weights=weights, offload_optimizer=optimizer, backend=backend)
    trained = run.trained(NUM_STEPS)
    state = [NamedShard(name, tensor.clone(), spec) for name, tensor, spec in run.optimizer.state_shards()]
    return Outcome(trained.losses, trained.norms, trained.evaluation, state, trained.weights, run.kept.host_bytes())


def _choices(name: str) -> list[tuple[ShardLevel, str]]:
    """Spread weights do not wait in host memory as well."""
    levels = LEVELS.get(name, ("none",))
    return [(level, what) for level in levels for what in OFFLOADS if level != "parameters" or what == "optimizer"]


def _outcomes(names: list[str]) -> dict[tuple[str, ShardLevel, str], Outcome]:
    host_storage.STAYS_BELOW = 1
    found = {}
    for name in names:
        for level in LEVELS.get(name, ("none",)):
            found[name, level, "nothing"] = _outcome(LAYOUTS[name], level, False, False)
        for level, what in _choices(name):
            found[name, level, what] = _outcome(LAYOUTS[name], level, *OFFLOADS[what])
    return found


@functools.cache
def _ranks(world: int, quick: bool) -> list[dict[tuple[str, ShardLevel, str], Outcome]]:
    names = [name for name, layout in LAYOUTS.items() if layout.grid.world_size == world and (name in QUICK) == quick]
    if world > 1:
        return spawn(_outcomes, world=world, args=(names,), timeout=110)
    before = host_storage.STAYS_BELOW
    try:
        return [_outcomes(names)]
    finally:
        host_storage.STAYS_BELOW = before


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "level", "what"),
    sampled(
        [(name, level, what) for name in LAYOUTS for level, what in _choices(name)],
        [(name, level, what) for name in QUICK for level, what in _choices(name)],
    ),
)
def test_the_bits_are_those_of_the_run_without(name: str, level: ShardLevel, what: str) -> None:
    ranks = _ranks(LAYOUTS[name].grid.world_size, name in QUICK)
    for rank in ranks:
        found, expected = rank[name, level, what], rank[name, level, "nothing"]
        assert found.losses == expected.losses and found.norms == expected.norms
        assert found.evaluation == expected.evaluation
        assert len(set(found.losses)) == NUM_STEPS
    for kind in ("state", "weights"):
        theirs, ours = (
            assemble([getattr(rank[name, level, each], kind) for rank in ranks]) for each in ("nothing", what)
        )
        assert theirs.keys() == ours.keys() and theirs
        for key, value in theirs.items():
            assert torch.equal(ours[key], value), (kind, key)


@pytest.mark.distributed
@pytest.mark.parametrize("name", sampled(LAYOUTS, QUICK))
def test_frozen_weights_are_in_host_memory(name: str) -> None:
    """All storages with something frozen in them: those of a model that is trained as a whole stay."""
    for rank in _ranks(LAYOUTS[name].grid.world_size, name in QUICK):
        held = rank[name, "none", "weights"].held
        trained_as_a_whole = LAYOUTS[name].case in ("everything", "tied", "deep, tied")
        assert (held == 0) == trained_as_a_whole
        assert rank[name, "none", "nothing"].held == rank[name, "none", "optimizer"].held == 0


@pytest.mark.parametrize("name", ["experts", "experts in nf4"])
def test_a_layers_experts_come_while_those_before_compute(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No expert's frozen weight, plain or encoded, stays on the device, and the copies of a layer's start before the
    experts of the layer before it compute."""
    monkeypatch.setattr(host_storage, "STAYS_BELOW", 1)
    run = Run(LAYOUTS[name], single_process_mesh(), "none", offload_weights=True)
    plain = [one.parameter for one in run.entries if ".experts." in one.name and one.name.endswith("weight")]
    frozen = plain or [one.memory for one in run.encoded if ".experts." in one.name]
    assert len(frozen) == 2 * 3 * 4 and not any(map(run.kept.is_resident, frozen))
    layers = run.stages.models()[0].layers
    keys = [{part.untyped_storage()._cdata for part in _storages(layer.mlp)} for layer in layers]
    events: list[str] = []
    start = HostFetch.start

    def noted(self: HostFetch) -> None:
        if self._copies is None:
            own = {one.whole.untyped_storage()._cdata for one in self._storages}
            events.extend(f"fetch {layer}" for layer, held in enumerate(keys) if own & held)
        start(self)

    monkeypatch.setattr(HostFetch, "start", noted)
    for layer, one in enumerate(layers):
        one.mlp.register_forward_pre_hook(lambda *_, layer=layer: events.append(f"compute {layer}"))
    run.gradients(1)
    forward = ["fetch 0", "fetch 1", "compute 0", "compute 1"]
    assert events[:4] == forward and events.count("fetch 0") == 2 * run.layout.accumulation


def _storages(mlp: torch.nn.Module) -> list[torch.Tensor]:
    """What the experts' weights lie in, plain or encoded."""
    plain = [entry.parameter for entry in shard_entries(mlp) if entry.name.endswith("_proj.weight")]
    return plain + [entry.memory for entry in encoded_entries(mlp)]
