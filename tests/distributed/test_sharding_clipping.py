"""Clipping at 0.3 is applied, by the norm that torch finds, whatever is spread over ranks and wherever it waits."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from engine.distributed.mesh import build_mesh
from engine.distributed.ranks import RankGrid
from engine.distributed.sharding import NamedShard
from engine.optim.state_sharding import ShardLevel
from tests.distributed.cases import relative_error
from tests.distributed.run_cases import SMALL
from tests.distributed.sharded_runs import CLIP, LEVELS, Layout, Run, assemble
from tests.support.spawning import spawn
from tests.support.sweeps import sampled

pytestmark = pytest.mark.distributed

NEARLY_PLAIN = 1e5
"""As learning rate and as eps: AdamW's first update is then lr g / (|g| + eps), the gradient itself within 1e-5 |g|."""
DP2 = Layout(case="head and adapters", grid=RankGrid(dp=2), dropout=0.0)
LAYOUTS = {
    "dp2": DP2,
    "dp4": replace(DP2, grid=RankGrid(dp=4)),
    "tp2 dp2": replace(DP2, grid=RankGrid(tp=2, dp=2), sequence=True),
    "pp2 dp2": replace(DP2, grid=RankGrid(pp=2, dp=2), layers=(1, 1)),
    "cp2": replace(DP2, grid=RankGrid(cp=2)),
}
QUICK = ("dp2", "cp2", "tp2 dp2")


class Update(NamedTuple):
    """One update, with its gradient before clipping."""

    gradient: list[NamedShard]
    norm: float
    before: list[NamedShard]
    after: list[NamedShard]


def _copied(shards: list[NamedShard]) -> list[NamedShard]:
    return [NamedShard(name, tensor.clone(), spec) for name, tensor, spec in shards]


def _update(layout: Layout, level: ShardLevel, clip: float, offloaded: bool) -> Update:
    mesh = build_mesh(layout.grid, device_type="cpu", num_kv_heads=SMALL.num_kv_heads)
    run = Run(
        layout, mesh, level, clip=clip, eps=NEARLY_PLAIN, weight_decay=0.0,
        offload_weights=offloaded and level != "parameters", offload_optimizer=offloaded,
    )  # fmt: skip
    before = _copied(run.flat.master_shards())
    run.step.gradients(*run.batches(1))
    gradient = _copied(run.flat.gradient_shards())
    norm = run.optimizer.step(NEARLY_PLAIN).item()
    return Update(gradient, norm, before, _copied(run.flat.master_shards()))


def _update_all(names: list[str]) -> dict[tuple[str, ShardLevel, float, bool], Update]:
    return {
        (name, level, clip, offloaded): _update(LAYOUTS[name], level, clip, offloaded)
        for name in names
        for level in LEVELS
        for clip in (0.0, CLIP)
        for offloaded in (False, True)
    }


@functools.cache
def _ranks(world: int, quick: bool) -> list[dict[tuple[str, ShardLevel, float, bool], Update]]:
    names = [name for name, layout in LAYOUTS.items() if layout.grid.world_size == world and (name in QUICK) == quick]
    return spawn(_update_all, world=world, args=(names,), timeout=110)


@pytest.mark.parametrize("offloaded", [False, True], ids=["on the device", "in host memory"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", sampled(LAYOUTS, QUICK))
def test_the_update_is_the_gradient_times_the_factor_of_torch(name: str, level: ShardLevel, offloaded: bool) -> None:
    ranks = _ranks(LAYOUTS[name].grid.world_size, name in QUICK)
    moved: dict[float, dict[str, torch.Tensor]] = {}
    for clip in (0.0, CLIP):
        updates = [rank[name, level, clip, offloaded] for rank in ranks]
        before, after = (assemble([getattr(one, kind) for one in updates]) for kind in ("before", "after"))
        moved[clip] = {key: before[key] - value for key, value in after.items()}
    gradients = assemble([rank[name, level, CLIP, offloaded].gradient for rank in ranks])
    leaves = [value.clone().requires_grad_() for value in gradients.values()]
    for leaf, value in zip(leaves, gradients.values(), strict=True):
        leaf.grad = value.clone()
    norm = torch.nn.utils.clip_grad_norm_(leaves, CLIP).item()
    assert norm > 2 * CLIP, "clipping would do little"
    assert all(rank[name, level, CLIP, offloaded].norm == pytest.approx(norm, rel=1e-6) for rank in ranks)
    for (key, gradient), leaf in zip(gradients.items(), leaves, strict=True):
        assert relative_error(moved[0.0][key], gradient) < 1e-3, key
        assert relative_error(moved[CLIP][key], leaf.grad) < 1e-3, key
        assert relative_error(moved[CLIP][key], moved[0.0][key] * (CLIP / norm)) < 1e-3, key
        assert relative_error(moved[CLIP][key], moved[0.0][key]) > 0.9 * (1 - CLIP / norm), f"{key} is not clipped"
