"""A vision model in front of the decoder, in every layout against one process, and on one process against autograd."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from engine.distributed.mesh import build_mesh, single_process_mesh
from engine.distributed.ranks import RankGrid
from engine.optim.state_sharding import ShardLevel
from engine.vision.tile_shares import deal_out
from tests.distributed.cases import relative_error
from tests.distributed.sharded_runs import Layout, Run, Trained, assemble
from tests.support.spawning import spawn

pytestmark = pytest.mark.distributed

KINDS = ("vision in full", "vision's adapters", "frozen vision")
ENCODED = ("encoded images", "frozen encoder")
ONE = Layout(case="vision in full", grid=RankGrid(), dropout=0.1)
LAYOUTS: dict[str, tuple[Layout, ShardLevel]] = {
    "tp2": (replace(ONE, grid=RankGrid(tp=2)), "none"),
    "tp2 sequence": (replace(ONE, grid=RankGrid(tp=2), sequence=True), "none"),
    "pp2": (replace(ONE, grid=RankGrid(pp=2), layers=(1, 1)), "none"),
    "cp2": (replace(ONE, grid=RankGrid(cp=2)), "none"),
    "dp2, optimizer": (replace(ONE, grid=RankGrid(dp=2)), "optimizer"),
    "dp2, gradients": (replace(ONE, grid=RankGrid(dp=2)), "gradients"),
    "dp2, parameters": (replace(ONE, grid=RankGrid(dp=2)), "parameters"),
    "dp2, parameters, recomputed": (replace(ONE, grid=RankGrid(dp=2), recompute="full"), "parameters"),
    "one, recomputed": (replace(ONE, recompute="full"), "none"),
}
NUM_STEPS = 4


def _kinds(name: str) -> tuple[str, ...]:
    return KINDS if name == "dp2, optimizer" else (*KINDS, *ENCODED)


def _of_kind(layout: Layout, kind: str) -> Layout:
    return replace(layout, case=kind)


def _run_all(names: list[str]) -> dict[tuple[str, str], Trained]:
    seen = {}
    for name in names:
        layout, level = LAYOUTS[name]
        for kind in _kinds(name):
            mesh = build_mesh(layout.grid, device_type="cpu", num_kv_heads=2)
            seen[name, kind] = Run(_of_kind(layout, kind), mesh, level).trained(NUM_STEPS)
    return seen


@functools.cache
def _ranks() -> list[dict[tuple[str, str], Trained]]:
    return spawn(_run_all, world=2, args=([name for name in LAYOUTS if not name.startswith("one")],), timeout=200)


@functools.cache
def _one(kind: str, recompute: str = "selective") -> Trained:
    layout = _of_kind(replace(ONE, recompute=recompute), kind)
    return Run(layout, single_process_mesh(), "none").trained(NUM_STEPS)


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in LAYOUTS for kind in _kinds(name)])
def test_layouts_equal_one_process(name: str, kind: str):
    expected = _one(kind)
    found = [_one(kind, "full")] if name.startswith("one") else [rank[name, kind] for rank in _ranks()]
    assert found[-1].losses == pytest.approx(expected.losses, rel=1e-5)
    assert found[0].norms == pytest.approx(expected.norms, rel=1e-5)
    apart = name.startswith(("dp2", "cp2"))  # each rank sums its own tokens
    evaluation = sum(one.evaluation for one in found) if apart else found[-1].evaluation
    assert evaluation == pytest.approx(expected.evaluation, rel=1e-5)
    whole, reference = assemble([one.masters for one in found]), assemble([expected.masters])
    assert whole.keys() == reference.keys() and any(key.startswith("vision") for key in whole) != ("frozen" in kind)
    errors = {key: relative_error(value, reference[key]) for key, value in whole.items()}
    assert max(errors.values()) < 1e-5, {key: error for key, error in errors.items() if error >= 1e-5}


STAGES = {
    "interleaved": replace(ONE, grid=RankGrid(pp=2), layers=(1, 1, 1, 1), schedule="interleaved"),
    "zb_v": replace(ONE, grid=RankGrid(pp=2), layers=(1, 1, 1, 1), schedule="zb_v"),
    "uneven, recomputed": replace(ONE, grid=RankGrid(pp=2), layers=(1, 3), recompute="full"),
}
"""Where layers that take features of images lie on several stages."""


def _run_stages() -> dict[str, Trained]:
    mesh = build_mesh(RankGrid(pp=2), device_type="cpu", num_kv_heads=2)
    return {
        name: Run(replace(layout, case="deep, deepstack"), mesh, "none").trained(NUM_STEPS)
        for name, layout in STAGES.items()
    }


def test_features_for_later_layers_pass_through_stages():
    """The bits of one process, in steps where some micro-batches have no images."""
    expected = Run(replace(ONE, case="deep, deepstack", layers=(4,)), single_process_mesh(), "none").trained(NUM_STEPS)
    ranks = spawn(_run_stages, world=2, timeout=100)
    for name in STAGES:
        losses = [rank[name].losses for rank in ranks if any(rank[name].losses)]
        assert expected.losses in losses, name
        whole, reference = (
            assemble([one.masters for one in found]) for found in ([rank[name] for rank in ranks], [expected])
        )
        assert whole.keys() == reference.keys() and any(key.startswith("vision") for key in whole)
        for key, value in whole.items():
            assert torch.equal(value, reference[key]), (name, key)


def test_tiles_are_dealt_out_whole_and_evenly():
    grids = [(4, 4), (1, 2), (8, 8), (4, 4), (2, 2)]
    for ranks in (1, 2, 3, 7):
        shares = deal_out(grids, ranks)
        assert [tile for share in shares for tile in range(5)[share.tiles]] == list(range(5))
        assert [patch for share in shares for patch in range(102)[share.patches]] == list(range(102))
    assert [(share.patches.stop - share.patches.start) for share in deal_out([(2, 2)] * 6, 3)] == [8, 8, 8]
