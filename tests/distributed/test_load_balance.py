"""The auxiliary loss of routers: in every layout, and in two micro-batches, against one process with one.

That one is held to transformers in tests/parity/test_load_balance.py.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from engine.distributed.mesh import Mesh, build_mesh, single_process_mesh
from engine.distributed.ranks import RankGrid
from engine.distributed.sharding import NamedShard
from engine.experts.router_load import RouterLoad
from tests.distributed.cases import relative_error
from tests.distributed.sharded_runs import Layout, Run, assemble
from tests.support.spawning import spawn
from tests.support.sweeps import sampled

pytestmark = pytest.mark.distributed

KINDS = ("four experts, in full", "four experts, adapters", "routed, attention's adapters", "biased, in full")
"""Routers that train, with and without everything else, and frozen ones above adapters of attention."""
ONE = Layout(case=KINDS[0], grid=RankGrid(), dropout=0.1, balance=0.5, accumulation=1)
TWO = replace(ONE, accumulation=2)
LAYOUTS = {
    "one, two micro-batches": TWO,
    "one, recomputed": replace(ONE, recompute="full"),
    "dp2": replace(ONE, grid=RankGrid(dp=2)),
    "dp2, two micro-batches": replace(TWO, grid=RankGrid(dp=2)),
    "tp2": replace(ONE, grid=RankGrid(tp=2)),
    "tp2 sequence, recomputed": replace(TWO, grid=RankGrid(tp=2), sequence=True, recompute="full"),
    "whole experts, tp2": replace(TWO, grid=RankGrid(tp=2, shards_experts=False)),
    "whole experts, tp2 sequence": replace(ONE, grid=RankGrid(tp=2, shards_experts=False), sequence=True),
    "ep2 of dp2": replace(TWO, grid=RankGrid(dp=2, ep=2)),
    "ep2 of tp2 sequence": replace(TWO, grid=RankGrid(tp=2, ep=2, shards_experts=False), sequence=True),
    "cp2": replace(ONE, grid=RankGrid(cp=2)),
    "pp2": replace(TWO, grid=RankGrid(pp=2), layers=(1, 1)),
    "pp2, one micro-batch": replace(ONE, grid=RankGrid(pp=2), layers=(1, 1)),
    "pp2, split backward": replace(TWO, grid=RankGrid(pp=2), layers=(1, 1), schedule="zb_h1"),
}
QUICK = ("one, two micro-batches", "tp2 sequence, recomputed", "ep2 of dp2", "pp2")
QUICK_KINDS = KINDS[1:3]
NUM_STEPS = 3


class Trained(NamedTuple):
    """What one rank saw."""

    losses: list[float]
    balance: list[float]
    load: list[float]
    rows: dict[str, list[int]]
    masters: list[NamedShard]


def _trained(layout: Layout, mesh: Mesh) -> Trained:
    run = Run(layout, mesh, "parameters" if layout.grid.dp > 1 and layout.grid.ep == 1 else "none")
    losses, balance, figures = [], [], []
    assert run.balance is not None
    load = RouterLoad(run.case.config, run.stages.models(), mesh, torch.device("cpu"), run.balance)
    for step in range(NUM_STEPS):
        load.before(step + 1)
        losses += run.train(step, step)[0]
        balance.append(run.balance.loss.item())
        figures += load.measured().tolist()
    return Trained(
        losses, balance, figures, load.take_rows(), [NamedShard(*shard) for shard in run.flat.master_shards()]
    )


def _computes(name: str, kind: str) -> bool:
    """Five experts do not divide."""
    return LAYOUTS[name].grid.ep == 1 or not kind.startswith("routed")


def _run_all(names: list[str], kinds: tuple[str, ...]) -> dict[tuple[str, str], Trained]:
    seen = {}
    for name in names:
        mesh = build_mesh(LAYOUTS[name].grid, device_type="cpu", num_kv_heads=2)
        for kind in (kind for kind in kinds if _computes(name, kind)):
            seen[name, kind] = _trained(replace(LAYOUTS[name], case=kind), mesh)
    return seen


@functools.cache
def _ranks(quick: bool) -> list[dict[tuple[str, str], Trained]]:
    names = [name for name in (QUICK if quick else LAYOUTS) if not name.startswith("one")]
    return spawn(_run_all, world=2, args=(names, QUICK_KINDS if quick else KINDS), timeout=400)


@functools.cache
def _one(kind: str) -> Trained:
    return _trained(replace(ONE, case=kind), single_process_mesh())


CASES = [(name, kind) for name in LAYOUTS for kind in KINDS if _computes(name, kind)]
QUICK_CASES = [(name, kind) for name in QUICK for kind in QUICK_KINDS if _computes(name, kind)]


@pytest.mark.parametrize(("name", "kind"), sampled(CASES, QUICK_CASES))
def test_layouts_equal_one_process(name: str, kind: str) -> None:
    """With a tensor rank's part of the gradient counted twice, or nothing counted beforehand, the losses of the second
    and the third step are off by more than 1e-5."""
    expected = _one(kind)
    if name.startswith("one"):
        found = [_trained(replace(LAYOUTS[name], case=kind), single_process_mesh())]
    else:
        found = [rank[name, kind] for rank in _ranks((name, kind) in QUICK_CASES)]
    assert found[-1].losses == pytest.approx(expected.losses, rel=1e-5)
    assert all(rank.balance == pytest.approx(expected.balance, rel=1e-6) for rank in found)
    assert all(rank.load == pytest.approx(expected.load, rel=1e-5) for rank in found)
    assert all(rank.rows == expected.rows for rank in found), "rows are counted twice, or by some ranks alone"
    whole, reference = assemble([one.masters for one in found]), assemble([expected.masters])
    assert whole.keys() == reference.keys()
    errors = _errors(whole, reference)
    assert max(errors.values()) < 1e-5, {key: error for key, error in errors.items() if error >= 1e-5}


def _errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    return {key: relative_error(value, expected[key]) for key, value in found.items()}
