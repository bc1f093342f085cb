"""Experts by token type, and cross attention: in every layout against one process, which is held to the original's code
in tests/unit/test_models_cogvlm.py."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.distributed.collectives import all_reduce
from engine.distributed.mesh import Mesh, build_mesh, single_process_mesh
from engine.distributed.ranks import RankGrid
from engine.distributed.sharding import NamedShard
from engine.layers.context import TensorLayout
from engine.layers.module import shard_entries
from engine.optim.state_sharding import ShardLevel
from tests.distributed.cases import relative_error
from tests.distributed.sharded_runs import Layout, Run, Trained, assemble, trained_layouts
from tests.support.cogvlm_cases import batch_of, model_of, plan_of
from tests.support.spawning import spawn
from tests.support.sweeps import sampled
from tests.support.vision_fixtures import VisionFixture

pytestmark = pytest.mark.distributed

KINDS = ("experts in full", "experts' adapters", "experts' adapters, unfolded", "vision experts' fused adapters")
ONE = Layout(case=KINDS[0], grid=RankGrid(), dropout=0.1)
LAYOUTS: dict[str, tuple[Layout, ShardLevel]] = {
    "tp2": (replace(ONE, grid=RankGrid(tp=2)), "none"),
    "tp2 sequence": (replace(ONE, grid=RankGrid(tp=2), sequence=True), "none"),
    "tp2 sequence, recomputed": (replace(ONE, grid=RankGrid(tp=2), sequence=True, recompute="full"), "none"),
    "tp2, attention recomputed": (replace(ONE, grid=RankGrid(tp=2), recompute="attention"), "none"),
    "pp2": (replace(ONE, grid=RankGrid(pp=2), layers=(1, 1)), "none"),
    "dp2, gradients": (replace(ONE, grid=RankGrid(dp=2)), "gradients"),
    "dp2, parameters": (replace(ONE, grid=RankGrid(dp=2)), "parameters"),
    "one, recomputed": (replace(ONE, recompute="full"), "none"),
    "one, kept": (replace(ONE, recompute="none"), "none"),
}
QUICK = ("tp2 sequence, recomputed", "pp2", "dp2, parameters", "one, recomputed")
NUM_STEPS = 4


@functools.cache
def _ranks(quick: bool) -> list[dict[tuple[str, str], Trained]]:
    layouts = {name: one for name, one in LAYOUTS.items() if not name.startswith("one") and (name in QUICK) == quick}
    return spawn(trained_layouts, world=2, args=(layouts, KINDS, NUM_STEPS), timeout=400)


@functools.cache
def _one(kind: str, recompute: str = "selective") -> Trained:
    return Run(replace(ONE, case=kind, recompute=recompute), single_process_mesh(), "none").trained(NUM_STEPS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sampled(LAYOUTS, QUICK))
def test_layouts_equal_one_process(name: str, kind: str):
    expected = _one(kind)
    found = (
        [_one(kind, LAYOUTS[name][0].recompute)]
        if name.startswith("one")
        else [rank[name, kind] for rank in _ranks(name in QUICK)]
    )
    assert found[-1].losses == pytest.approx(expected.losses, rel=1e-5)
    assert found[0].norms == pytest.approx(expected.norms, rel=1e-5)
    whole, reference = assemble([one.masters for one in found]), assemble([expected.masters])
    assert whole.keys() == reference.keys()
    errors = {key: relative_error(value, reference[key]) for key, value in whole.items()}
    assert max(errors.values()) < 1e-5, {key: error for key, error in errors.items() if error >= 1e-5}


def _fixture_gradients(mesh: Mesh, sequence: bool, name: str) -> tuple[Tensor, list[NamedShard]]:
    """The losses of a fixture's rows, and this rank's part of every gradient, summed as its record says."""
    data = VisionFixture(name)
    layout = TensorLayout(tp=mesh.tp, kv_replica=mesh.kv_replica, sequence_parallel=sequence)
    model, batch = model_of(data, plan_of(".*"), layout=layout), batch_of(data, CASE)
    context = model.context(batch, torch.zeros((), dtype=torch.int64), training=False)
    losses = model.token_losses(model.run_layers(model.embed(batch), context), batch, context)
    (losses * batch.loss_weights_BS.flatten()).sum().backward()
    shards = []
    for entry in shard_entries(model):
        if entry.sink is not None:
            gradient = entry.sink.buffer
            for group in entry.spec.grad_reduce:
                gradient = all_reduce(gradient, {"tp": mesh.tp, "kv_replica": mesh.kv_replica}[group])
            shards.append(NamedShard(entry.name, gradient.clone(), entry.spec))
    return losses.detach(), shards


CASE = "two_samples_padded"
FIXTURES = ("cogvlm2", "cogagent")


def _run_fixtures(name: str) -> list[tuple[Tensor, list[NamedShard]]]:
    mesh = build_mesh(RankGrid(tp=dist.get_world_size()), device_type="cpu", num_kv_heads=2)
    return [_fixture_gradients(mesh, sequence, name) for sequence in (False, True)]


@pytest.mark.parametrize("name", FIXTURES)
def test_two_ranks_have_the_fixtures_gradients(name: str):
    VisionFixture(name)
    losses, shards = _fixture_gradients(single_process_mesh(), False, name)
    reference = assemble([shards])
    ranks = spawn(_run_fixtures, world=2, args=(name,), timeout=200)
    for index in range(2):
        torch.testing.assert_close(ranks[0][index][0], losses, atol=1e-5, rtol=0.0)
        whole = assemble([rank[index][1] for rank in ranks])
        assert whole.keys() == reference.keys()
        # of the last layer's vision expert hardly anything has a gradient
        scale = max(gradient.norm().item() for gradient in reference.values())
        for key, expected in reference.items():
            assert (whole[key] - expected).norm() < 1e-5 * max(expected.norm().item(), 1e-3 * scale), key
