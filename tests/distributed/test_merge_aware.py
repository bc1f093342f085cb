"""Runs that merge adapters into their encoded base before it is rounded, in each layout.

Every rank's merged numbers have the bits of one process's, since each is computed from its own row of B and column of
A. Losses and gradients differ by the order of sums alone; in later steps such a difference may put a number on the
other side of a rounding bound.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from engine.distributed.mesh import build_mesh, single_process_mesh
from engine.distributed.ranks import RankGrid
from engine.distributed.sharding import NamedShard
from engine.experts.ops import merged_experts
from engine.layers import host_storage
from engine.layers.merged_codes import merged_codes, merging_storages
from engine.ops import merged_weight
from engine.ops.merged_weight import MergedRows
from engine.optim.state_sharding import ShardLevel
from engine.quantization.encoding import Encoding
from tests.distributed.cases import relative_error
from tests.distributed.sharded_runs import Layout, Run, assemble
from tests.support.spawning import spawn
from tests.support.sweeps import sampled

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(360)]

NUM_STEPS = 4
ONE = Layout(case="blocks, adapters", grid=RankGrid(), dropout=0.0, merge_aware=True)
EXPERTS = replace(ONE, case="routed blocks, adapters")
FUSED = replace(ONE, case="four experts, one A for gate and up")
OUTER = replace(ONE, case="four experts, shared outer")
LAYOUTS = {
    "tp2": replace(ONE, grid=RankGrid(tp=2)),
    "tp2, sequence": replace(ONE, grid=RankGrid(tp=2), sequence=True),
    "tp2, all again": replace(ONE, grid=RankGrid(tp=2), sequence=True, recompute="full"),
    "pp2": replace(ONE, grid=RankGrid(pp=2), layers=(1, 1)),
    "pp2, zero bubble": replace(ONE, grid=RankGrid(pp=2), layers=(1, 1), schedule="zb_h1"),
    "cp2": replace(ONE, grid=RankGrid(cp=2)),
    "dp2": replace(ONE, grid=RankGrid(dp=2)),
    "tp2, sequence, experts": replace(EXPERTS, grid=RankGrid(tp=2), sequence=True),
    "pp2, experts": replace(EXPERTS, grid=RankGrid(pp=2), layers=(1, 1)),
    "ep2, experts": replace(EXPERTS, grid=RankGrid(dp=2, ep=2)),
    "ep2, shared outer": replace(OUTER, grid=RankGrid(dp=2, ep=2)),
    "ep2, one A for gate and up": replace(FUSED, grid=RankGrid(dp=2, ep=2)),
}
ANY = ("nvfp4", "mxfp4", "mxfp8", "fp8_block", "int4", "int8")
CUT = ("nvfp4", "mxfp4", "mxfp8")
"""Formats none of whose blocks two ranks cut."""
CHOICES: list[tuple[str, ShardLevel, str]] = [
    (name, level, base)
    for name, layout in LAYOUTS.items()
    for level in (("none", "optimizer", "gradients", "parameters") if name in ("dp2", "ep2, experts") else ("none",))
    for base in (CUT if layout.grid.tp > 1 else ANY)
]  # fmt: skip
QUICK: list[tuple[str, ShardLevel, str]] = [
    ("tp2, sequence", "none", "nvfp4"), ("pp2", "none", "fp8_block"), ("dp2", "parameters", "int4"),
    ("ep2, experts", "parameters", "mxfp4"),
]  # fmt: skip


class Outcome(NamedTuple):
    """The results of a run: the first step's gradients, the losses, the merged numbers of its forward, and evaluations
    after all steps, of which the middle one is with codes that are merged before its first pass."""

    gradients: list[NamedShard]
    losses: list[float]
    evaluation: float
    merged: list[NamedShard]
    with_codes: list[float]


def _outcome(layout: Layout, level: ShardLevel, *, offload: bool = False) -> Outcome:
    one = layout.grid.world_size == 1
    mesh = single_process_mesh() if one else build_mesh(layout.grid, device_type="cpu", num_kv_heads=2)
    seen: dict[int, Tensor] = {}
    compute = merged_weight.decode_merged

    def recorded(encoding: Encoding, sections: Sequence[MergedRows], out_OI: Tensor) -> Tensor:
        out = compute(encoding, sections, out_OI)
        for rows, parts, own in sections:
            if own is not None:
                seen.setdefault(id(parts), out[rows].clone())
        return out

    merged_weight.decode_merged = merged_experts.decode_merged = recorded
    try:
        run = Run(layout, mesh, level, offload_weights=offload)
        gradients = run.gradients(1)
        trained = run.trained(NUM_STEPS)
    finally:
        merged_weight.decode_merged = merged_experts.decode_merged = compute
    merged = [NamedShard(one.name, seen[id(one.parts)], one.spec) for one in run.encoded if id(one.parts) in seen]
    return Outcome(gradients, trained.losses, trained.evaluation, merged, _with_codes(run))


def _with_codes(run: Run) -> list[float]:
    """Evaluations by merging in each product, from codes that have the adapters, and by merging again."""
    models, (batches, _) = run.stages.models(), run.batches(99)
    found, waiting = [], [run.kept.waiting_memory(one.memory).clone() for one in merging_storages(models)]
    for codes in (False, True, False):
        with merged_codes(models, run.kept) if codes else nullcontext():
            now = [run.kept.waiting_memory(one.memory) for one in merging_storages(models)]
            # of a rank's parts of small matrices some are padding
            changed = sum(not torch.equal(one, other) for one, other in zip(now, waiting, strict=True))
            assert (changed > 0) == codes
            found.append(run.stages.figures(batches)[0].item())
    return found


def _outcomes(choices: Sequence[tuple[str, ShardLevel, str]]) -> list[Outcome]:
    return [_outcome(replace(LAYOUTS[name], base=base), level) for name, level, base in choices]


@functools.cache
def _ranks(quick: bool) -> list[list[Outcome]]:
    return spawn(_outcomes, world=2, args=(_run_together(quick),), timeout=600)


def _run_together(quick: bool) -> list[tuple[str, ShardLevel, str]]:
    return [choice for choice in CHOICES if (choice in QUICK) == quick]


@functools.cache
def _alone(case: str, base: str) -> Outcome:
    return _outcome(replace(ONE, case=case, base=base), "none")


@pytest.mark.parametrize(("name", "level", "base"), sampled(CHOICES, QUICK))
def test_every_layout_computes_as_one_process_does(name: str, level: ShardLevel, base: str) -> None:
    choice = (name, level, base)
    quick = choice in QUICK
    ranks = [rank[_run_together(quick).index(choice)] for rank in _ranks(quick)]
    case = LAYOUTS[name].case
    assert isinstance(case, str)
    alone = _alone(case, base)
    merged, expected = assemble([one.merged for one in ranks]), assemble([alone.merged])
    assert merged.keys() == expected.keys() and len(merged) >= 14
    for weight, numbers in expected.items():
        assert torch.equal(merged[weight], numbers), weight
    gradients, whole = assemble([one.gradients for one in ranks]), assemble([alone.gradients])
    assert gradients.keys() == whole.keys()
    for parameter, value in whole.items():
        assert relative_error(gradients[parameter], value) < 1e-5, parameter
    for found in ranks:
        assert len(set(found.with_codes)) == 1 and found.with_codes[0] != found.evaluation
        assert found.losses[0] == pytest.approx(alone.losses[0], rel=1e-6)
        assert found.losses == pytest.approx(alone.losses, rel=1e-3)
    assert len(set(alone.losses)) == NUM_STEPS


def test_weights_that_wait_in_host_memory_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_storage, "STAYS_BELOW", 1)
    found = _outcome(replace(ONE, base="nvfp4"), "none", offload=True)
    expected = _alone("blocks, adapters", "nvfp4")
    assert found.losses == expected.losses and found.evaluation == expected.evaluation
    assert found.with_codes == expected.with_codes and len(set(found.with_codes)) == 1
    ours, theirs = assemble([found.merged]), assemble([expected.merged])
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
