"""Expert parallelism: mixtures whose experts are divided over ranks against one process, in every layout, and against
the same layout with all experts on each rank, bit for bit.

One process is held to transformers in tests/unit/test_models_families.py and tests/parity/test_routed_training.py.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from engine.distributed.mesh import build_mesh, single_process_mesh
from engine.distributed.ranks import RankGrid
from engine.distributed.sharding import NamedShard
from engine.optim.state_sharding import ShardLevel
from tests.distributed.cases import relative_error
from tests.distributed.sharded_runs import Layout, Run, Trained, assemble, trained_layouts
from tests.kernels.native_support import needs_native
from tests.support.spawning import spawn
from tests.support.sweeps import sampled

pytestmark = pytest.mark.distributed

KINDS = (
    "four experts, adapters", "four experts, shared outer", "four experts, shared", "four experts, in full",
    "four experts, adapters of one", "four experts, one A for gate and up", "grouped, adapters", "grouped, in full",
    "biased, adapters", "biased, in full", "narrow, adapters", "narrow, in full",
)  # fmt: skip
QUICK_KINDS = KINDS[:2]
ONE = Layout(case=KINDS[0], grid=RankGrid(), dropout=0.1)
WHOLE = replace(ONE, sequence=True)


def _on(layout: Layout = ONE, **sizes: int) -> Layout:
    """The layout on a grid whose tensor ranks share experts' features."""
    return replace(layout, grid=RankGrid(**sizes))


def _whole(layout: Layout = WHOLE, **sizes: int) -> Layout:
    """The layout on a grid whose tensor ranks send tokens of their own to whole experts."""
    return replace(layout, grid=RankGrid(**sizes, shards_experts=False))


LAYOUTS: dict[str, tuple[Layout, ShardLevel]] = {
    "ep2 of dp2": (_on(dp=2, ep=2), "none"),
    "ep2 of dp2, recomputed": (replace(_on(dp=2, ep=2), recompute="full"), "none"),
    "ep2 of dp2, all kept": (replace(_on(dp=2, ep=2), recompute="none"), "optimizer"),
    "ep2 of dp2, parameters": (_on(dp=2, ep=2), "parameters"),
    "ep2 of cp2": (_on(cp=2, ep=2), "none"),
    "ep2 of cp2, gradients": (_on(cp=2, ep=2), "gradients"),
    "ep2 of tp2, sequence": (_whole(tp=2, ep=2), "none"),
    "ep2 of tp2": (_whole(ONE, tp=2, ep=2), "none"),
    "ep2 of tp2, recomputed": (replace(_whole(ONE, tp=2, ep=2), recompute="full"), "none"),
    "whole experts, tp2, sequence": (_whole(tp=2), "none"),
    "whole experts, tp2, parameters": (_whole(tp=2), "parameters"),
    "ep4 of dp4": (_on(dp=4, ep=4), "none"),
    "ep2 of dp4": (_on(dp=4, ep=2), "none"),
    "ep2 of dp4, optimizer": (_on(dp=4, ep=2), "optimizer"),
    "ep2 of dp4, gradients": (_on(dp=4, ep=2), "gradients"),
    "ep2 of dp4, parameters": (_on(dp=4, ep=2), "parameters"),
    "ep2 of dp2, cut over tp2": (_on(dp=2, tp=2, ep=2), "none"),
    "ep2 of dp2, cut over tp2, sequence": (_on(WHOLE, dp=2, tp=2, ep=2), "parameters"),
    "ep4 of dp2 x tp2, sequence": (_whole(dp=2, tp=2, ep=4), "optimizer"),
    "ep4 of dp2 x tp2": (_whole(ONE, dp=2, tp=2, ep=4), "none"),
    "ep2 of dp2 x tp2, sequence": (_whole(dp=2, tp=2, ep=2), "gradients"),
    "ep2 of dp2 x tp2, parameters": (_whole(dp=2, tp=2, ep=2), "parameters"),
    "ep2 of cp2 x tp2, sequence": (_whole(cp=2, tp=2, ep=2), "none"),
    "ep4 of dp2 x cp2": (_on(dp=2, cp=2, ep=4), "parameters"),
    "ep2 of dp2, pp2": (replace(_on(dp=2, pp=2, ep=2), layers=(1, 1)), "none"),
    "ep2 of dp2, pp2, split backward": (replace(_on(dp=2, pp=2, ep=2), layers=(1, 1), schedule="zb_h1"), "none"),
    "ep2 of tp2, pp2, sequence": (replace(_whole(tp=2, pp=2, ep=2), layers=(1, 1)), "optimizer"),
}
QUICK = ("ep2 of dp2, parameters", "ep2 of tp2, sequence", "whole experts, tp2, sequence")
NUM_STEPS = 4


@functools.cache
def _ranks(world: int, quick: bool) -> list[dict[tuple[str, str], Trained]]:
    names = QUICK if quick else LAYOUTS
    layouts = {name: LAYOUTS[name] for name in names if LAYOUTS[name][0].grid.world_size == world}
    kinds = QUICK_KINDS if quick else KINDS
    return spawn(trained_layouts, world=world, args=(layouts, kinds, NUM_STEPS), timeout=900)


@functools.cache
def _one(kind: str) -> Trained:
    return Run(replace(ONE, case=kind), single_process_mesh(), "none").trained(NUM_STEPS)


CASES = [(name, kind) for name in LAYOUTS for kind in KINDS]
QUICK_CASES = [(name, kind) for name in QUICK for kind in QUICK_KINDS]


@pytest.mark.parametrize(("name", "kind"), sampled(CASES, QUICK_CASES))
def test_layouts_equal_one_process(name: str, kind: str):
    """Adapters of one expert alone train nothing on the ranks of the others, which still have to take part in backward:
    without a stand-in that requires a gradient there, these fail and the rank with the expert is lost."""
    _check(name, kind)


def _gradients(names: tuple[str, ...], kind: str) -> dict[str, list[NamedShard]]:
    """This rank's gradients of a first step in each layout."""
    found = {}
    for name in names:
        layout, level = LAYOUTS[name]
        mesh = build_mesh(layout.grid, device_type="cpu", num_kv_heads=2)
        found[name] = Run(replace(layout, case=kind), mesh, level).gradients(1)
    return found


def test_one_adapter_over_gate_and_up_has_the_gradients_of_one_process():
    """Each is an expert's own. Summed over all data ranks, as it would be by default, it is that of several experts."""
    kind, names = "four experts, one A for gate and up", ("ep2 of dp2", "ep2 of cp2, gradients", "ep2 of tp2, sequence")
    expected = assemble([Run(replace(ONE, case=kind), single_process_mesh(), "none").gradients(1)])
    assert all(value.any() for value in expected.values()) and any("gate_up_proj.lora_A" in name for name in expected)
    ranks = spawn(_gradients, world=2, args=(names, kind), timeout=120)
    for name in names:
        found = assemble([rank[name] for rank in ranks])
        assert found.keys() == expected.keys()
        errors = {key: relative_error(value, expected[key]) for key, value in found.items()}
        assert max(errors.values()) < 1e-5, (name, {key: error for key, error in errors.items() if error >= 1e-5})


BUGS = {
    "Megatron-Bridge#5634, adapters where experts are cut, beside a shared one": "ep2 of dp2, cut over tp2",
    "miles#3232, an adapter's output counted once a tensor rank": "ep2 of tp2, sequence",
    "Megatron-Bridge#5231, adapters of experts not summed over data ranks": "whole experts, tp2, sequence",
}


@pytest.mark.parametrize(("bug", "name"), sampled(BUGS.items(), list(BUGS.items())[1:]))
def test_public_bugs(bug: str, name: str):
    _check(name, KINDS[0])


def _check(name: str, kind: str) -> None:
    expected, world = _one(kind), LAYOUTS[name][0].grid.world_size
    found = [rank[name, kind] for rank in _ranks(world, (name, kind) in QUICK_CASES)]
    assert found[-1].losses == pytest.approx(expected.losses, rel=1e-5)
    assert found[0].norms == pytest.approx(expected.norms, rel=1e-5)
    whole, reference = assemble([one.masters for one in found]), assemble([expected.masters])
    assert whole.keys() == reference.keys()
    errors = {key: relative_error(value, reference[key]) for key, value in whole.items()}
    assert max(errors.values()) < 1e-5, {key: error for key, error in errors.items() if error >= 1e-5}


def _one_micro_batch(grids: tuple[RankGrid, ...]) -> list[tuple[Trained, list[NamedShard]]]:
    """What runs come to, and the gradients of their first steps."""
    found = []
    for grid in grids:
        layout = replace(ONE, grid=grid, accumulation=1, compiled=True)
        mesh = build_mesh(grid, device_type="cpu", num_kv_heads=2)
        run = Run(layout, mesh, "none")
        run.step.gradients(*run.batches(1))
        gradients = [NamedShard(name, tensor.clone(), spec) for name, tensor, spec in run.flat.gradient_shards()]
        found.append((Run(layout, mesh, "none").trained(NUM_STEPS), gradients))
    return found


@needs_native
def test_megatron_bridge_5484_result_depends_on_the_number_of_expert_ranks():
    """Four steps of two data-parallel ranks, with all experts on each and with half of them: the same bits. If the rows
    of both ranks were one sum, those of 48 of 84 gradients would differ."""
    ranks = spawn(_one_micro_batch, world=2, args=((RankGrid(dp=2), RankGrid(dp=2, ep=2)),), timeout=120)
    for (alone, _), (divided, _) in ranks:
        assert divided.losses == alone.losses and divided.norms == alone.norms
        assert divided.evaluation == alone.evaluation
    for read in (lambda seen: seen[0].masters, lambda seen: seen[1]):
        alone, divided = (assemble([read(rank[place]) for rank in ranks]) for place in (0, 1))
        differing = [name for name, value in alone.items() if not torch.equal(value, divided[name])]
        assert alone.keys() == divided.keys() and not differing, differing
