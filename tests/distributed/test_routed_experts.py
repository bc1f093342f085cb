"""Mixtures of experts: in every layout against one process, which is held to transformers in
tests/unit/test_models_families.py and tests/parity/test_routed_training.py."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from engine.distributed.mesh import single_process_mesh
from engine.distributed.ranks import RankGrid
from engine.optim.state_sharding import ShardLevel
from tests.distributed.cases import relative_error
from tests.distributed.sharded_runs import Layout, Run, Trained, assemble, trained_layouts
from tests.support.spawning import spawn
from tests.support.sweeps import sampled

pytestmark = pytest.mark.distributed

KINDS = (
    "routed, adapters", "routed, shared outer", "routed, one A for gate and up", "routed, shared", "routed, ranks",
    "routed, in full", "routed, attention's adapters", "grouped, adapters", "grouped, in full", "biased, adapters",
    "biased, in full",
)  # fmt: skip
ONE = Layout(case=KINDS[0], grid=RankGrid(), dropout=0.1)
LAYOUTS: dict[str, tuple[Layout, ShardLevel]] = {
    "tp2": (replace(ONE, grid=RankGrid(tp=2)), "none"),
    "tp2 sequence": (replace(ONE, grid=RankGrid(tp=2), sequence=True), "none"),
    "tp2 sequence, recomputed": (replace(ONE, grid=RankGrid(tp=2), sequence=True, recompute="full"), "none"),
    "tp2, attention recomputed": (replace(ONE, grid=RankGrid(tp=2), recompute="attention"), "optimizer"),
    "pp2": (replace(ONE, grid=RankGrid(pp=2), layers=(1, 1)), "none"),
    "pp2, split backward": (replace(ONE, grid=RankGrid(pp=2), layers=(1, 1), schedule="zb_h1"), "none"),
    "cp2": (replace(ONE, grid=RankGrid(cp=2)), "none"),
    "cp2, parameters": (replace(ONE, grid=RankGrid(cp=2)), "parameters"),
    "dp2, optimizer": (replace(ONE, grid=RankGrid(dp=2)), "optimizer"),
    "dp2, gradients": (replace(ONE, grid=RankGrid(dp=2)), "gradients"),
    "dp2, parameters": (replace(ONE, grid=RankGrid(dp=2)), "parameters"),
    "one, recomputed": (replace(ONE, recompute="full"), "none"),
    "one, kept": (replace(ONE, recompute="none"), "none"),
}
QUICK = ("tp2 sequence, recomputed", "pp2", "dp2, parameters", "one, recomputed")
QUICK_KINDS = KINDS[:2]
NUM_STEPS = 4


@functools.cache
def _ranks(quick: bool) -> list[dict[tuple[str, str], Trained]]:
    layouts = {name: LAYOUTS[name] for name in (QUICK if quick else LAYOUTS) if not name.startswith("one")}
    return spawn(trained_layouts, world=2, args=(layouts, QUICK_KINDS if quick else KINDS, NUM_STEPS), timeout=400)


@functools.cache
def _one(kind: str, recompute: str = "selective") -> Trained:
    return Run(replace(ONE, case=kind, recompute=recompute), single_process_mesh(), "none").trained(NUM_STEPS)


CASES = [(name, kind) for name in LAYOUTS for kind in KINDS]
QUICK_CASES = [(name, kind) for name in QUICK for kind in QUICK_KINDS]


@pytest.mark.parametrize(("name", "kind"), sampled(CASES, QUICK_CASES))
def test_layouts_equal_one_process(name: str, kind: str):
    expected = _one(kind)
    found = (
        [_one(kind, LAYOUTS[name][0].recompute)]
        if name.startswith("one")
        else [rank[name, kind] for rank in _ranks((name, kind) in QUICK_CASES)]
    )
    assert found[-1].losses == pytest.approx(expected.losses, rel=1e-5)
    assert found[0].norms == pytest.approx(expected.norms, rel=1e-5)
    whole, reference = assemble([one.masters for one in found]), assemble([expected.masters])
    assert whole.keys() == reference.keys()
    errors = {key: relative_error(value, reference[key]) for key, value in whole.items()}
    assert max(errors.values()) < 1e-5, {key: error for key, error in errors.items() if error >= 1e-5}
