"""Every row of the table of partial gradients, at 2 and 4 tensor-parallel ranks, with non-zero B and dropout 0.1.

One spawn per world size runs all cases; each named test then looks at one row of one case. One process, which is
compared with plain torch elsewhere, is the measure.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from engine.distributed.mesh import Mesh, build_mesh, single_process_mesh
from engine.distributed.ranks import RankGrid
from engine.distributed.sharding import ShardSpec
from tests.distributed.cases import build, cut, make_batch, relative_error, trained_names
from tests.distributed.gradient_table import CASES, ROWS, Row, rows_for
from tests.support.spawning import spawn

pytestmark = pytest.mark.distributed

WORLDS = (2, 4)
TOLERANCE = 1e-5
PARTIAL = 1e-3
"""A rank's own part of a sum differs from the sum by far more than rounding."""


class Measured(NamedTuple):
    """What one rank saw of one case."""

    losses: Tensor
    raw: dict[str, Tensor]
    summed: dict[str, Tensor]
    specs: dict[str, ShardSpec]
    norm: float


def _supported(name: str, world: int) -> bool:
    """A fused adapter needs at least one key/value head per rank."""
    return not (CASES[name].fused and world > CASES[name].config.num_kv_heads)


def _measure(name: str, mesh: Mesh) -> Measured:
    built = build(CASES[name], mesh)
    batch = make_batch(
        [(0, (9, 1, 14)), (1, (24,)), (2, (5, 5, 11))], row_length=24, seq_length=24, vocab_size=131, seed=1
    )
    with torch.no_grad():
        losses = built.model(batch, built.stage.step)
    built.stage.load([batch], float(batch.loss_weights_BS.sum()))
    built.stage.forward(0)
    built.stage.backward(0)
    raw = built.gradients()
    built.reducer.finish()
    summed = built.gradients()
    norm = built.optimizer.step(0.0).item()
    return Measured(losses, raw, summed, built.specs(), norm)


def _all_cases(world: int) -> dict[str, Measured]:
    meshes = {heads: build_mesh(RankGrid(tp=world), device_type="cpu", num_kv_heads=heads) for heads in (1, 2)}
    return {
        name: _measure(name, meshes[case.config.num_kv_heads])
        for name, case in CASES.items()
        if _supported(name, world)
    }


@functools.cache
def _ranks(world: int) -> list[dict[str, Measured]]:
    return spawn(_all_cases, world=world, args=(world,))


@functools.cache
def _alone(name: str) -> Measured:
    return _measure(name, single_process_mesh())


def _named_rows() -> list[tuple[int, str, Row]]:
    found = []
    for world in WORLDS:
        for name in CASES:
            names = trained_names(CASES[name]) if _supported(name, world) else ()
            rows = {row: None for key in names for row in rows_for(name, key, world)}
            found += [(world, name, row) for row in rows]
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Rows of the table only where they speak of a parameter of the case."""
    if "row" in metafunc.fixturenames:
        rows = _named_rows()
        ids = [f"tp{world}-{name}-{row.title}" for world, name, row in rows]
        metafunc.parametrize(("world", "name", "row"), rows, ids=ids)
    elif "name" in metafunc.fixturenames:
        pairs = [(world, name) for world in WORLDS for name in CASES if _supported(name, world)]
        metafunc.parametrize(("world", "name"), pairs, ids=[f"tp{world}-{name}" for world, name in pairs])


def test_gradient_before_reduction(world: int, name: str, row: Row):
    expected, ranks = _alone(name).raw, [rank[name] for rank in _ranks(world)]
    matching = [key for key in expected if row in rows_for(name, key, world)]
    assert matching
    copies = {"complete": 1, "tp": world, "replica": world // CASES[name].config.num_kv_heads}[row.kind]
    for key in matching:
        for first in range(0, world, copies):
            group = ranks[first : first + copies]
            total = torch.stack([rank.raw[key] for rank in group]).sum(0)
            slices = [cut(expected[key], rank.specs[key]) for rank in group]
            assert all(torch.equal(part, slices[0]) for part in slices), f"{key}: these ranks hold different parts"
            if slices[0].norm() == 0:  # a shard of nothing but padding
                assert total.norm() == 0, key
                continue
            assert relative_error(total, slices[0]) < TOLERANCE, key
            if row.kind != "complete":
                parts = [relative_error(rank.raw[key], slices[0]) for rank in group]
                assert min(parts) > PARTIAL, f"{key}: already complete before the sum"


def test_gradient_after_reduction(world: int, name: str):
    expected = _alone(name).summed
    for place, rank in enumerate(_ranks(world)):
        measured = rank[name]
        assert measured.summed.keys() == expected.keys()
        errors = {
            key: relative_error(measured.summed[key], cut(expected[key], measured.specs[key]))
            for key in expected
            if cut(expected[key], measured.specs[key]).norm() > 0
        }
        wrong = {key: error for key, error in errors.items() if error >= TOLERANCE}
        assert not wrong, f"rank {place}: {wrong}"


def test_losses_are_those_of_one_process(world: int, name: str):
    for rank in _ranks(world):
        torch.testing.assert_close(rank[name].losses, _alone(name).losses, rtol=0, atol=5e-6)


def test_norm_counts_every_parameter_once(world: int, name: str):
    for rank in _ranks(world):
        assert rank[name].norm == pytest.approx(_alone(name).norm, rel=1e-5)


def test_one_row_speaks_of_each_parameter(world: int, name: str):
    for key in _alone(name).raw:
        rows = rows_for(name, key, world)
        assert len(rows) == 1, f"{key}: {[row.title for row in rows]}"


def test_every_row_is_met():
    met = {row.title for _, _, row in _named_rows()}
    assert met == {row.title for row in ROWS}
