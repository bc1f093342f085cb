"""Runs whose frozen weights are in the vendors' formats, in each layout: bit for bit those on the decoded weights, on
ranks that hold the bits of the whole matrix's parts. Formats that share scales over 128 columns need wider layers than
those of `test_encoded_base.py`, and over 128 rows bring scales that ranks and sections cut."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from engine.distributed.mesh import build_mesh, single_process_mesh
from engine.distributed.ranks import RankGrid
from engine.distributed.sharding import NamedShard, ShardSpec
from engine.layers import host_storage
from engine.optim.state_sharding import ShardLevel
from engine.quantization.encoding import encoding
from tests.distributed.cases import Case, relative_error, small_config, whole_tensor
from tests.distributed.gradient_table import EVERY_LINEAR
from tests.distributed.run_cases import EVEN, EVERY_EXPERT
from tests.distributed.sharded_runs import Layout, Run, assemble
from tests.support.shared_scales import encoded_whole
from tests.support.spawning import spawn
from tests.support.sweeps import sampled

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(360)]

FORMATS = ("nvfp4", "mxfp4", "mxfp8", "fp8_block", "int4")
NUM_STEPS = 2
EPS = 1e-5
"""AdamW's: with 1e-8 an element whose gradient is nothing but rounding moves by the whole learning rate, by which one
token of a mixture chose another expert."""
WIDE = {"num_layers": 2, "hidden": 256, "intermediate": 256, "head_dim": 32}
DENSE = Case(config=small_config(**WIDE), adapters=EVERY_LINEAR)
MIXTURE = Case(
    config=small_config(**WIDE, variants=(replace(EVEN.variants[0], intermediate=256, shared=256),)),
    adapters=EVERY_EXPERT,
    trained=".*router",
)
ONE = Layout(case=DENSE, grid=RankGrid())
EXPERTS = replace(ONE, case=MIXTURE)
LAYOUTS: dict[str, tuple[Layout, ShardLevel]] = {
    "one": (ONE, "none"),
    "one, experts": (EXPERTS, "none"),
    "tp2": (replace(ONE, grid=RankGrid(tp=2)), "none"),
    "tp2, sequence": (replace(ONE, grid=RankGrid(tp=2), sequence=True), "none"),
    "pp2": (replace(ONE, grid=RankGrid(pp=2), layers=(1, 1)), "none"),
    "dp2, optimizer": (replace(ONE, grid=RankGrid(dp=2)), "optimizer"),
    "dp2, parameters": (replace(ONE, grid=RankGrid(dp=2)), "parameters"),
    "cp2": (replace(ONE, grid=RankGrid(cp=2)), "none"),
    "tp2, sequence, experts": (replace(EXPERTS, grid=RankGrid(tp=2), sequence=True), "none"),
    "ep2, experts": (replace(EXPERTS, grid=RankGrid(dp=2, ep=2)), "none"),
    "ep2, parameters, experts": (replace(EXPERTS, grid=RankGrid(dp=2, ep=2)), "parameters"),
    "tp2 x pp2": (replace(ONE, grid=RankGrid(tp=2, pp=2), layers=(1, 1), sequence=True), "none"),
    "tp2 x ep2, parameters, experts": (
        replace(EXPERTS, grid=RankGrid(dp=2, tp=2, ep=2), sequence=True),
        "parameters",
    ),
}
ALL = [(name, base) for name in LAYOUTS for base in FORMATS]
QUICK = [
    *(("one", base) for base in FORMATS), ("one, experts", "nvfp4"), ("tp2, sequence", "nvfp4"),
    ("tp2, sequence", "fp8_block"), ("ep2, parameters, experts", "nvfp4"),
]  # fmt: skip


class Outcome(NamedTuple):
    """What is compared."""

    losses: list[float]
    norms: list[float]
    masters: list[NamedShard]
    parts: list[tuple[str, ShardSpec, dict[str, Tensor]]]


def _outcome(layout: Layout, level: ShardLevel, *, offload: bool = False) -> Outcome:
    one = layout.grid.world_size == 1
    mesh = single_process_mesh() if one else build_mesh(layout.grid, device_type="cpu", num_kv_heads=2)
    run = Run(layout, mesh, level, offload_weights=offload, eps=EPS)
    parts = [
        (entry.name, entry.spec, {name: part.clone() for name, part in entry.parts.items()})
        for entry in run.encoded
        if run.kept.is_resident(entry.memory)
    ]
    trained = run.trained(NUM_STEPS)
    return Outcome(trained.losses, trained.norms, trained.masters, parts)


def _outcomes(cases: Iterable[tuple[str, str]]) -> dict[tuple[str, str, str], Outcome]:
    found = {}
    for name, base in cases:
        layout, level = LAYOUTS[name]
        found[name, base, "encoded"] = _outcome(replace(layout, base=base), level)
        found[name, base, "plain"] = _outcome(replace(layout, rounded=base), level)
    return found


@functools.cache
def _ranks(world: int, quick: bool) -> list[dict[tuple[str, str, str], Outcome]]:
    cases = [one for one in ALL if LAYOUTS[one[0]][0].grid.world_size == world and (one in QUICK) == quick]
    return [_outcomes(cases)] if world == 1 else spawn(_outcomes, world=world, args=(cases,), timeout=300)


def _found(name: str, base: str, kind: str = "encoded") -> list[Outcome]:
    ranks = _ranks(LAYOUTS[name][0].grid.world_size, (name, base) in QUICK)
    return [rank[name, base, kind] for rank in ranks]


@pytest.mark.parametrize(("name", "base"), sampled(ALL, QUICK))
def test_the_bits_are_those_of_decoded_weights(name: str, base: str) -> None:
    for found, expected in zip(_found(name, base), _found(name, base, "plain"), strict=True):
        assert found.losses == expected.losses and found.norms == expected.norms
        assert len(set(found.losses)) == NUM_STEPS
        for ours, theirs in zip(found.masters, expected.masters, strict=True):
            assert ours.name == theirs.name and torch.equal(ours.tensor, theirs.tensor), ours.name


SEVERAL = [one for one in ALL if not one[0].startswith("one")]


@pytest.mark.parametrize(("name", "base"), sampled(SEVERAL, [one for one in SEVERAL if one in QUICK]))
def test_every_layout_trains_as_one_process_does(name: str, base: str) -> None:
    """Sums in another order, in fp32."""
    (alone,) = _found("one, experts" if name.endswith("experts") else "one", base)
    ranks = _found(name, base)
    for found in ranks:
        assert found.losses == pytest.approx(alone.losses, rel=1e-5)
        assert found.norms == pytest.approx(alone.norms, rel=1e-4)
    ours, theirs = assemble([found.masters for found in ranks]), assemble([alone.masters])
    assert ours.keys() == theirs.keys()
    for one in ours:
        assert relative_error(ours[one], theirs[one]) < 1e-4, one


@pytest.mark.parametrize(("name", "base"), sampled(SEVERAL, [one for one in SEVERAL if one in QUICK]))
def test_ranks_encode_as_the_whole(name: str, base: str) -> None:
    """Each row of scales is that of the block, of 128 rows of the whole matrix in FP8 blocks, that it lies in."""
    seen = 0
    for rank in _found(name, base):
        shapes = {weight: spec.global_shape for weight, spec, _ in rank.parts}
        for weight, spec, parts in rank.parts:
            rows, columns = (spec.runs(dim)[0] for dim in (0, 1))
            codec = encoding(base).stacked([rows.global_offset, rows.length])
            whole = encoded_whole(codec, weight, shapes, whole_tensor)
            there = slice(rows.global_offset, rows.global_offset + rows.length)
            expected = codec.cut(whole, there, slice(columns.global_offset, columns.global_offset + columns.length))
            for part, tensor in parts.items():
                many = len(tensor) // len(expected[part])  # where a stack's other sections are cut more finely
                theirs = expected[part].repeat_interleave(many, 0).contiguous()
                assert torch.equal(tensor.view(torch.uint8), theirs.view(torch.uint8)), (weight, part)
            seen += 1
    assert seen >= 14 or LAYOUTS[name][1] == "parameters"


@pytest.mark.parametrize("base", sampled(FORMATS, ["nvfp4"]))
def test_weights_wait_in_host_memory(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_storage, "STAYS_BELOW", 1)
    found = _outcome(replace(ONE, base=base), "none", offload=True)
    (expected,) = _found("one", base)
    assert not found.parts, "some encoded weights never leave the device"
    assert found.losses == expected.losses and found.norms == expected.norms
