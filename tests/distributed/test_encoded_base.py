"""Runs whose frozen weights are stored encoded, in each layout.

With an encoding that is decoded for each product a run has the bits of one whose weights were replaced by what the
encoding makes of them and stored plain. Ranks encode their own cut of a weight with the bits of the whole. FP8
products round their operands too, each rank those that it has, so that ranks which cut a sum differ by that rounding.
"""

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
from engine.distributed.sharding import NamedShard
from engine.layers import host_storage
from engine.optim.state_sharding import ShardLevel
from engine.quantization.encoding import encoding
from tests.distributed.cases import relative_error, whole_tensor
from tests.distributed.run_cases import BLOCKS
from tests.distributed.sharded_runs import Layout, Run, assemble
from tests.support.shared_scales import encoded_whole
from tests.support.spawning import spawn
from tests.support.sweeps import sampled

pytestmark = pytest.mark.distributed

NUM_STEPS = 4
ONE = Layout(case="blocks, adapters", grid=RankGrid())
EXPERTS = replace(ONE, case="routed blocks, adapters")
IMAGES = replace(ONE, case="llava blocks", plain=r"vision\..*")
LAYOUTS = {
    "one": ONE,
    "one, part of a linear trains": replace(
        # what lies in one linear with a weight that trains stays as it is
        ONE,
        case="blocks, part",
        plain=r"layers\.1\.attention\.[qkv]_proj\.weight",
    ),
    "one, all again": replace(ONE, recompute="full"),
    "one, inputs kept": replace(ONE, recompute="none"),
    "one, bfloat16": replace(ONE, dtype=torch.bfloat16),
    "tp2": replace(ONE, grid=RankGrid(tp=2)),
    "tp2, sequence": replace(ONE, grid=RankGrid(tp=2), sequence=True),
    "tp2, attention again": replace(ONE, grid=RankGrid(tp=2), sequence=True, recompute="attention"),
    "pp2": replace(ONE, grid=RankGrid(pp=2), layers=(1, 1)),
    "cp2": replace(ONE, grid=RankGrid(cp=2)),
    "dp2": replace(ONE, grid=RankGrid(dp=2)),
    "one, experts": EXPERTS,
    "tp2, sequence, experts": replace(EXPERTS, grid=RankGrid(tp=2), sequence=True),
    "pp2, experts": replace(EXPERTS, grid=RankGrid(pp=2), layers=(1, 1)),
    "dp2, experts": replace(EXPERTS, grid=RankGrid(dp=2)),
    "one, images": IMAGES,
    "tp2, sequence, images": replace(IMAGES, grid=RankGrid(tp=2), sequence=True),
    "pp2, images": replace(IMAGES, grid=RankGrid(pp=2), layers=(1, 1)),
    "cp2, images": replace(IMAGES, grid=RankGrid(cp=2)),
    "dp2, images": replace(IMAGES, grid=RankGrid(dp=2)),
    "ep2 of dp2, experts": replace(EXPERTS, grid=RankGrid(dp=2, ep=2)),
    "one, one expert trains": replace(
        # all gates and ups of its layer stay as they are, on every rank
        EXPERTS,
        case="routed blocks, part",
        plain=r"layers\.0\.mlp\.experts\.\d\.(gate|up)_proj\.weight",
    ),
    "ep2 of dp2, one expert trains": replace(
        EXPERTS,
        case="routed blocks, part",
        grid=RankGrid(dp=2, ep=2),
        plain=r"layers\.0\.mlp\.experts\.\d\.(gate|up)_proj\.weight",
    ),
    "ep2 of tp2, sequence, experts": replace(EXPERTS, grid=RankGrid(tp=2, ep=2, shards_experts=False), sequence=True),
    "whole on tp2, experts": replace(EXPERTS, grid=RankGrid(tp=2, shards_experts=False)),
    "ep2 of dp2, cut over tp2, experts": replace(EXPERTS, grid=RankGrid(dp=2, tp=2, ep=2), sequence=True),
    "ep2 of dp2 x tp2, experts": replace(EXPERTS, grid=RankGrid(dp=2, tp=2, ep=2, shards_experts=False)),
}
SLOW = (
    "one, all again", "one, inputs kept", "dp2", "tp2, sequence, images",
    "tp2", "tp2, attention again", "pp2", "cp2", "pp2, experts", "dp2, experts", "pp2, images", "cp2, images",
    "dp2, images", "whole on tp2, experts", "ep2 of dp2, one expert trains", "ep2 of tp2, sequence, experts",
    "ep2 of dp2, cut over tp2, experts", "ep2 of dp2 x tp2, experts",
)  # fmt: skip
"""What others have parts of."""
LEVELS: dict[str, tuple[ShardLevel, ...]] = {
    "dp2": ("none", "optimizer", "gradients", "parameters"),
    "dp2, experts": ("parameters",),
    "dp2, images": ("gradients", "parameters"),
    "ep2 of dp2, experts": ("parameters",),
    "ep2 of tp2, sequence, experts": ("none", "parameters"),
    "ep2 of dp2, cut over tp2, experts": ("parameters",),
    "ep2 of dp2 x tp2, experts": ("none", "optimizer", "gradients", "parameters"),
}
DECODED = ("nf4", "int8")
FP8 = ("fp8", "fp8_row")
ALL_BASES = ("one", "tp2", "tp2, sequence", "pp2")
"""Layouts in which every encoding runs; in the others nf4 alone."""


DECODED_BASES = (*ALL_BASES, "one, experts", "ep2 of dp2, experts")
"""Layouts in which those run that are decoded."""


def _choices(among: Iterable[str] = LAYOUTS) -> list[tuple[str, ShardLevel, str]]:
    """Layouts, levels of sharding and encodings that are decoded."""
    return [
        (name, level, base)
        for name in among
        for level in LEVELS.get(name, ("none",))
        for base in (DECODED if name in DECODED_BASES else ("nf4",))
    ]


class Outcome(NamedTuple):
    """What is compared."""

    losses: list[float]
    norms: list[float]
    evaluation: float
    masters: list[NamedShard]
    parts: list[tuple[str, slice, slice, dict[str, Tensor]]]
    """The name of each encoded weight, its rows and columns in the whole, and its parts."""


def _outcome(layout: Layout, level: ShardLevel, *, offload: bool = False) -> Outcome:
    one = layout.grid.world_size == 1
    mesh = single_process_mesh() if one else build_mesh(layout.grid, device_type="cpu", num_kv_heads=2)
    run = Run(layout, mesh, level, offload_weights=offload)
    parts = []
    for entry in run.encoded:
        if run.kept.is_resident(entry.memory):
            rows, columns = (entry.spec.runs(dim)[0] for dim in (0, 1))
            parts.append(
                (
                    entry.name,
                    slice(rows.global_offset, rows.global_offset + rows.length),
                    slice(columns.global_offset, columns.global_offset + columns.length),
                    {name: part.clone() for name, part in entry.parts.items()},
                )
            )
    trained = run.trained(NUM_STEPS)
    return Outcome(trained.losses, trained.norms, trained.evaluation, trained.masters, parts)


QUICK = [name for name in LAYOUTS if name not in SLOW]


def _outcomes(world: int, quick: bool) -> dict[tuple[str, ShardLevel, str, str], Outcome]:
    found = {}
    for name, level, base in [*_choices(), *((name, "none", base) for name in ALL_BASES for base in FP8)]:
        layout = LAYOUTS[name]
        if layout.grid.world_size == world and (name in QUICK) == quick:
            found[name, level, base, "encoded"] = _outcome(replace(layout, base=base), level)
            found[name, level, base, "plain"] = _outcome(replace(layout, rounded=base), level)
    return found


@functools.cache
def _ranks(world: int, quick: bool) -> list[dict[tuple[str, ShardLevel, str, str], Outcome]]:
    return [_outcomes(1, quick)] if world == 1 else spawn(_outcomes, world=world, args=(world, quick), timeout=110)


def _found(name: str, base: str, kind: str = "encoded", level: ShardLevel = "none") -> list[Outcome]:
    return [rank[name, level, base, kind] for rank in _ranks(LAYOUTS[name].grid.world_size, name in QUICK)]


@pytest.mark.parametrize(("name", "level", "base"), sampled(_choices(), _choices(QUICK)))
def test_the_bits_are_those_of_decoded_weights(name: str, level: ShardLevel, base: str) -> None:
    for found, expected in zip(_found(name, base, level=level), _found(name, base, "plain", level), strict=True):
        assert found.losses == expected.losses and found.norms == expected.norms
        assert found.evaluation == expected.evaluation
        assert len(set(found.losses)) == NUM_STEPS
        for ours, theirs in zip(found.masters, expected.masters, strict=True):
            assert ours.name == theirs.name and torch.equal(ours.tensor, theirs.tensor), ours.name


@pytest.mark.parametrize(
    ("name", "level", "base"),
    sampled(
        [one for one in _choices() if not one[0].startswith("one")],
        _choices(["tp2, sequence", "tp2, sequence, experts"]),
    ),
)
def test_every_layout_trains_as_one_process_does(name: str, level: ShardLevel, base: str) -> None:
    """Sums in another order, in fp32."""
    kind = name.rpartition(", ")[2]
    (alone,) = _found(f"one, {kind}" if kind in ("experts", "images", "one expert trains") else "one", base)
    ranks = _found(name, base, level=level)
    for found in ranks:
        assert found.losses == pytest.approx(alone.losses, rel=1e-5)
        assert found.norms == pytest.approx(alone.norms, rel=1e-4)
    ours, theirs = assemble([found.masters for found in ranks]), assemble([alone.masters])
    assert ours.keys() == theirs.keys()
    for one in ours:
        assert relative_error(ours[one], theirs[one]) < 1e-4, one


@pytest.mark.parametrize("base", (*DECODED, *FP8))
@pytest.mark.parametrize("name", sampled(["tp2", "tp2, sequence", "pp2"], ["tp2, sequence"]))
def test_ranks_encode_as_the_whole(name: str, base: str) -> None:
    """Encoding a cut gives the bits of cutting what the whole weight is encoded as."""
    codec, seen = encoding(base), 0
    for rank in _found(name, base):
        shapes = {one: _whole_shape(one.removesuffix(".weight").rpartition(".")[2]) for one, *_ in rank.parts}
        for weight, rows, columns, parts in rank.parts:
            assert weight.startswith("layers.")
            expected = codec.cut(encoded_whole(codec, weight, shapes, whole_tensor), rows, columns)
            for part, tensor in parts.items():
                assert torch.equal(tensor.view(torch.uint8), expected[part].contiguous().view(torch.uint8)), weight
            seen += 1
    assert seen == 14 * (1 if name == "pp2" else 2)


def _whole_shape(leaf: str) -> tuple[int, int]:
    hidden, wide = BLOCKS.hidden, BLOCKS.intermediate
    queries, keys = BLOCKS.num_heads * BLOCKS.head_dim, BLOCKS.num_kv_heads * BLOCKS.head_dim
    return {
        "q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden), "o_proj": (hidden, queries),
        "gate_proj": (wide, hidden), "up_proj": (wide, hidden), "down_proj": (hidden, wide),
    }[leaf]  # fmt: skip


ROUNDING = 0.02
"""The error of a loss in whose products operands have the four bits of e4m3."""


@pytest.mark.parametrize("base", FP8)
@pytest.mark.parametrize("name", sampled(["tp2", "tp2, sequence", "pp2"], ["tp2, sequence"]))
def test_fp8_products_differ_by_their_rounding_alone(name: str, base: str) -> None:
    """The stages of a pipeline multiply what one process does. Tensor ranks round their own operands, which one process
    rounds as a whole: their losses differ by as much as each differs from that of weights that were decoded before,
    0.002 to 0.009."""
    (alone,), (plain,) = _found("one", base), _found("one", base, "plain")
    assert 0 < max(abs(a - b) for a, b in zip(alone.losses, plain.losses, strict=True)) < ROUNDING
    for found in _found(name, base):
        moved = max(abs(a - b) for a, b in zip(found.losses, alone.losses, strict=True))
        assert moved < (1e-5 if name == "pp2" else ROUNDING)


def _one_micro_batch(grids: tuple[RankGrid, ...]) -> list[Outcome]:
    layout = replace(EXPERTS, accumulation=1)
    return [_outcome(replace(layout, grid=grid, base=base), "none") for base in (*DECODED, *FP8) for grid in grids]


@pytest.mark.slow
def test_encoded_experts_on_other_ranks() -> None:
    """As all experts on each of two data-parallel ranks: to 1e-7, by which products of these sizes depend on the number
    of their rows. Where attention rounds its operands to fp8, that moves a loss by up to 0.009."""
    ranks = spawn(_one_micro_batch, world=2, args=((RankGrid(dp=2), RankGrid(dp=2, ep=2)),), timeout=110)
    for place, base in enumerate((*DECODED, *FP8)):
        alone, divided = ([rank[2 * place + grid] for rank in ranks] for grid in (0, 1))
        for found, expected in zip(divided, alone, strict=True):
            tolerance = {"rel": 1e-6} if base in DECODED else {"abs": ROUNDING}
            assert found.losses == pytest.approx(expected.losses, **tolerance), base
            assert found.norms == pytest.approx(expected.norms, **tolerance), base
            assert sum("experts" in name for name, *_ in found.parts) == 12
            assert sum("experts" in name for name, *_ in expected.parts) == 24
        ours, theirs = (assemble([found.masters for found in one]) for one in (divided, alone))
        assert ours.keys() == theirs.keys()
        moved = max(relative_error(ours[name], theirs[name]) for name in theirs)
        assert moved < (1e-6 if base in DECODED else ROUNDING), base


@pytest.mark.parametrize("base", DECODED)
def test_encoded_weights_wait_in_host_memory(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_storage, "STAYS_BELOW", 1)
    found = _outcome(replace(ONE, base=base), "none", offload=True)
    (expected,) = _found("one", base)
    assert not found.parts, "some encoded weights never leave the device"
    assert found.losses == expected.losses and found.norms == expected.norms
