"""Sharded training against the same run unsharded: weights after twenty steps, norms, replicas."""

from __future__ import annotations

import functools
from itertools import product

import pytest
import torch

from engine.distributed.mesh import build_mesh
from engine.distributed.ranks import RankGrid
from engine.layers import sharded_storage
from engine.optim.state_sharding import ShardLevel
from tests.distributed.cases import relative_error
from tests.distributed.run_cases import SMALL
from tests.distributed.sharded_runs import CLIP, LEVELS, Layout, Run, Trained, assemble
from tests.support.spawning import spawn
from tests.support.sweeps import sampled

pytestmark = pytest.mark.distributed

NUM_STEPS = 20

LAYOUTS = {
    "dp2 adapters": Layout(case="adapters", grid=RankGrid(dp=2)),
    "dp2 everything": Layout(case="everything", grid=RankGrid(dp=2), accumulation=1),
    "dp2 upper adapters, all made again": Layout(case="upper adapters", grid=RankGrid(dp=2), recompute="full"),
    "dp2 bfloat16": Layout(case="head and adapters", grid=RankGrid(dp=2), dtype=torch.bfloat16),
    "cp2 adapters": Layout(case="head and adapters", grid=RankGrid(cp=2)),
    "dp4 everything": Layout(case="everything", grid=RankGrid(dp=4), accumulation=1),
    "tp2 dp2 adapters": Layout(case="adapters", grid=RankGrid(tp=2, dp=2), sequence=True, accumulation=1),
    "tp2 dp2 everything": Layout(case="everything", grid=RankGrid(tp=2, dp=2)),
    "pp2 dp2 tied": Layout(case="tied", grid=RankGrid(pp=2, dp=2), layers=(1, 1)),
    "pp2 dp2 tied, zb_v": Layout(
        case="deep, tied", grid=RankGrid(pp=2, dp=2), layers=(1, 1, 1, 1), schedule="zb_v", accumulation=4
    ),
    "cp2 dp2 adapters": Layout(case="adapters", grid=RankGrid(cp=2, dp=2)),
}
QUICK = ("dp2 everything", "dp2 bfloat16", "cp2 adapters", "tp2 dp2 adapters", "pp2 dp2 tied")
"""What the others have parts of."""
SHARDED = [level for level in LEVELS if level != "none"]


def _train_all(names: list[str]) -> dict[tuple[str, ShardLevel], Trained]:
    sharded_storage.GATHERED_ALONE = 4096  # both ways of gathering are taken
    results = {}
    for name in names:
        layout = LAYOUTS[name]
        mesh = build_mesh(layout.grid, device_type="cpu", num_kv_heads=SMALL.num_kv_heads)
        for level in LEVELS:
            results[name, level] = Run(layout, mesh, level).trained(NUM_STEPS)
    return results


@functools.cache
def _ranks(world: int, quick: bool) -> list[dict[tuple[str, ShardLevel], Trained]]:
    names = [name for name, layout in LAYOUTS.items() if layout.grid.world_size == world and (name in QUICK) == quick]
    return spawn(_train_all, world=world, args=(names,), timeout=100)


def _of(name: str, level: ShardLevel) -> list[Trained]:
    return [rank[name, level] for rank in _ranks(LAYOUTS[name].grid.world_size, name in QUICK)]


every_run = pytest.mark.parametrize(
    ("name", "level"), sampled(product(LAYOUTS, SHARDED), list(product(QUICK, SHARDED)))
)


@every_run
def test_weights_after_twenty_steps(name: str, level: ShardLevel) -> None:
    """A sum of two ranks has the same bits in either order; of four ranks it does not."""
    grid = LAYOUTS[name].grid
    masters = [assemble([rank.masters for rank in _of(name, each)]) for each in ("none", level)]
    assert masters[0].keys() == masters[1].keys()
    for key, expected in masters[0].items():
        if grid.dp * grid.cp == 2:
            assert torch.equal(masters[1][key], expected), key
        else:
            assert relative_error(masters[1][key], expected) < 1e-5, key


@every_run
def test_weights_that_the_model_computes_with(name: str, level: ShardLevel) -> None:
    """Trained and frozen ones, wherever they are kept: equal to the masters where there are masters."""
    ranks = _of(name, level)
    masters, weights = (assemble([getattr(rank, kind) for rank in ranks]) for kind in ("masters", "weights"))
    plain = assemble([rank.weights for rank in _of(name, "none")])
    assert weights.keys() == plain.keys()
    for key, expected in plain.items():
        assert relative_error(weights[key], expected) < 1e-5
        assert key not in masters or torch.equal(weights[key], masters[key].to(expected.dtype)), key


@every_run
def test_losses_and_norms(name: str, level: ShardLevel) -> None:
    for rank, plain in zip(_of(name, level), _of(name, "none"), strict=True):
        assert min(plain.norms) > CLIP, "clipping did nothing"
        torch.testing.assert_close(torch.tensor(rank.losses), torch.tensor(plain.losses), rtol=1e-5, atol=0)
        assert rank.evaluation == pytest.approx(plain.evaluation, rel=1e-5)
        torch.testing.assert_close(torch.tensor(rank.norms), torch.tensor(plain.norms), rtol=1e-5, atol=0)
