"""What layers keep for backward, on two ranks: each level equals one plain process, and has the bits of its own layout.

Three steps of a model with adapters everywhere, dropout 0.1, trained norms, packed documents and two micro-batches.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.distributed.mesh import Mesh, build_mesh, single_process_mesh
from engine.distributed.ranks import RankGrid
from engine.distributed.sharding import ShardSpec
from engine.layers.recompute import Level, MemoryPlan
from engine.layers.rounding import FLOAT8
from tests.distributed.cases import Case, cut, relative_error, small_config
from tests.distributed.gradient_table import EVERY_LINEAR
from tests.support.memory_models import build_with, long_batch, num_targets, packed_batches, total_error
from tests.support.spawning import spawn

pytestmark = pytest.mark.distributed

NUM_STEPS, LR = 3, 1e-3
CONFIG = small_config(num_layers=3)
CASE = Case(config=CONFIG, adapters=EVERY_LINEAR, trained=".*norm")
LAYOUTS = {
    "tp2": (RankGrid(tp=2), {}),
    "tp2 joint": (RankGrid(tp=2), {"joint": True}),
    "tp2 sequence": (RankGrid(tp=2), {"sequence_parallel": True}),
    "dp2": (RankGrid(dp=2), {}),
}
LEVELS: tuple[Level, ...] = ("selective", "none", "attention", "full")


class Trained(NamedTuple):
    """What one rank saw: losses, the last step's gradients (its part), and how often it called an all-reduce."""

    losses: Tensor
    gradients: dict[str, Tensor]
    specs: dict[str, ShardSpec]
    all_reduces: int


class _Counter:
    """Stands before torch's all_reduce and counts."""

    def __init__(self) -> None:
        self.calls, self._inner = 0, dist.all_reduce

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        return self._inner(*args, **options)


def _train(case: Case, level: Level, mesh: Mesh) -> Trained:
    built = build_with(case, MemoryPlan(recompute=level), mesh)
    losses, counter = [], _Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counter)
        for step in range(NUM_STEPS):
            batches = packed_batches(CONFIG.vocab_size, step, mesh.dp.rank, mesh.dp.size)
            targets = num_targets(packed_batches(CONFIG.vocab_size, step))
            losses.append(built.step(batches, targets, LR).loss)
    last = packed_batches(CONFIG.vocab_size, NUM_STEPS, mesh.dp.rank, mesh.dp.size)
    built.step.gradients(last, num_targets(packed_batches(CONFIG.vocab_size, NUM_STEPS)))
    return Trained(torch.stack(losses), built.gradients(), built.specs(), counter.calls)


def _train_all() -> dict[tuple[str, Level], Trained]:
    results = {}
    for name, (grid, changes) in LAYOUTS.items():
        mesh = build_mesh(grid, device_type="cpu", num_kv_heads=CONFIG.num_kv_heads)
        results |= {(name, level): _train(replace(CASE, **changes), level, mesh) for level in LEVELS}
    return results


@functools.cache
def _ranks() -> list[dict[tuple[str, Level], Trained]]:
    return spawn(_train_all, world=2)


@functools.cache
def _alone() -> Trained:
    return _train(CASE, "selective", single_process_mesh())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_one_process(layout: str, level: Level) -> None:
    alone = _alone()
    for rank in _ranks():
        found = rank[layout, level]
        torch.testing.assert_close(found.losses, alone.losses, rtol=0, atol=1e-5)
        assert found.gradients.keys() == alone.gradients.keys()
        errors = {
            name: relative_error(found.gradients[name], cut(expected, found.specs[name]))
            for name, expected in alone.gradients.items()
        }
        assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_has_the_bits_of_its_layout(layout: str, level: Level) -> None:
    """What is made again is made by the same operations and collectives."""
    for rank in _ranks():
        found, expected = rank[layout, level], rank[layout, "selective"]
        assert torch.equal(found.losses, expected.losses)
        assert not [key for key, value in expected.gradients.items() if not torch.equal(found.gradients[key], value)]


@pytest.mark.parametrize("layout", ["tp2", "tp2 joint"])
def test_collectives_done_again(layout: str) -> None:
    """The output projection of a layer that is made again sums over the tensor ranks; a region's last linear does not:
    nobody reads its output."""
    batches = 2 * NUM_STEPS
    for rank in _ranks():
        calls = {level: rank[layout, level].all_reduces for level in LEVELS}
        assert calls["none"] == calls["attention"] == calls["selective"] > 4 * CONFIG.num_layers * batches
        assert calls["full"] == calls["selective"] + CONFIG.num_layers * batches


def _rounded(dtype: torch.dtype, level: Level, case: Case, mesh: Mesh) -> tuple[Tensor, dict[str, Tensor], float]:
    """Loss, gradients and reported error of one micro-batch; without rounding for fp32."""
    stored = None if dtype == torch.float32 else dtype
    built = build_with(case, MemoryPlan(recompute=level, stored_dtype=stored), mesh)
    batch = long_batch(CONFIG.vocab_size)
    loss = built.step.gradients([batch], num_targets([batch]))
    report = built.model.saved.take_report()
    return loss, built.gradients(), report.error() if report is not None else 0.0


def _rounded_on_two() -> list[list[tuple[Tensor, dict[str, Tensor], float]]]:
    mesh = build_mesh(RankGrid(tp=2), device_type="cpu", num_kv_heads=CONFIG.num_kv_heads)
    case = replace(CASE, sequence_parallel=True)
    return [[_rounded(dtype, level, case, mesh) for dtype in (torch.float32, FLOAT8)] for level in LEVELS]


def test_rounding_with_sequence_parallelism() -> None:
    """Each rank rounds its tokens and heads; forward has the same bits, gradients are off by a few times the error."""
    for rank in spawn(_rounded_on_two, world=2):
        for (exact_loss, exact, _), (loss, gradients, error) in rank:
            assert torch.equal(loss, exact_loss)
            assert error == pytest.approx(2.64e-2, rel=0.05)
            assert error < total_error(gradients, exact) < 5 * error
