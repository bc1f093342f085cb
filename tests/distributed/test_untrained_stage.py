"""Pipeline ranks on which nothing trains, at each level of sharding: they hold no masters, and take part even so."""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch

from engine.distributed.mesh import build_mesh
from engine.distributed.ranks import RankGrid
from engine.optim.state_sharding import ShardLevel
from tests.distributed.run_cases import SMALL
from tests.distributed.sharded_runs import LEVELS, Layout, Run, Trained, assemble
from tests.support.spawning import spawn

pytestmark = pytest.mark.distributed

NUM_STEPS = 2
GRID = RankGrid(pp=2, dp=2)
FOUR = (1, 1, 1, 1)

LAYOUTS = {
    "last adapters": Layout(case="deep, last adapters", grid=GRID, layers=(2, 2), first=1),
    "last layer": Layout(case="deep, last layer", grid=GRID, layers=(2, 2), first=1, recompute="full"),
    "last adapters, zb_h1": Layout(case="deep, last adapters", grid=GRID, layers=(2, 2), first=1, schedule="zb_h1"),
    "last adapters, interleaved": Layout(
        case="deep, last adapters", grid=GRID, layers=FOUR, first=3, schedule="interleaved"
    ),
    "first adapters": Layout(case="deep, first adapters", grid=GRID, layers=(2, 2)),
}
"""In the last one the upper stage has a backward, and nothing to sum in it."""


class _Key(NamedTuple):
    layout: str
    level: ShardLevel
    offload: bool
    """Masters and moments are in host memory."""


KEYS = [
    _Key(layout, level, offload)
    for layout in LAYOUTS
    for level in LEVELS
    for offload in (False, True)
    if not offload or layout == "last adapters"
]


def _train_all() -> dict[_Key, Trained]:
    mesh = build_mesh(GRID, device_type="cpu", num_kv_heads=SMALL.num_kv_heads)
    results = {}
    for key in KEYS:
        run = Run(LAYOUTS[key.layout], mesh, key.level, offload_optimizer=key.offload)
        results[key] = run.trained(NUM_STEPS)
    return results


@functools.cache
def _ranks() -> list[dict[_Key, Trained]]:
    return spawn(_train_all, world=GRID.world_size, timeout=100)


SHARDED = [key for key in KEYS if key.level != "none"]


@pytest.mark.parametrize(
    "key", SHARDED, ids=[f"{key.layout}, {key.level}{key.offload * ', offload'}" for key in SHARDED]
)
def test_trains_as_unsharded(key: _Key) -> None:
    ranks = [rank[key] for rank in _ranks()]
    plain = [rank[key._replace(level="none")] for rank in _ranks()]
    assert [bool(rank.masters) for rank in plain].count(False) == 2, "one stage was to train nothing"
    for kind in ("masters", "weights"):
        found, expected = (assemble([getattr(rank, kind) for rank in some]) for some in (ranks, plain))
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), (kind, name)
    for rank, other in zip(ranks, plain, strict=True):
        torch.testing.assert_close(
            torch.tensor([*rank.losses, *rank.norms]), torch.tensor([*other.losses, *other.norms])
        )
