"""Twenty whole optimizer steps under each layout against one process: losses, gradients by name, clip norm, replicas.

A random Llama with 8 heads, 2 key/value heads, an odd vocabulary and 3 layers; adapters everywhere with non-zero B,
dropout 0.1, gradient accumulation 2. Documents are packed, or one to a row with padding, or one micro-batch is packed
and the other not.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from engine.batch import Batch
from engine.distributed.mesh import Mesh, build_mesh, single_process_mesh
from engine.distributed.ranks import RankGrid
from engine.distributed.sharding import ShardSpec
from tests.distributed.cases import Case, build, cut, make_batch, relative_error, small_config
from tests.distributed.gradient_table import EVERY_LINEAR
from tests.support.spawning import spawn

pytestmark = pytest.mark.distributed

NUM_STEPS = 20
COMPARED = (1, 5)
"""Steps, from 1, whose gradients are compared."""
ACCUMULATION = 2
GLOBAL_ROWS = 8
SEQ_LENGTH = 24
LR = 1e-3
BASE = Case(config=small_config(num_layers=3), adapters=EVERY_LINEAR)


@dataclass(frozen=True)
class Layout:
    """How the ranks are used."""

    grid: RankGrid
    sequence: bool = False
    joint: bool = False

    def case(self) -> Case:
        return replace(BASE, sequence_parallel=self.sequence, joint=self.joint)


LAYOUTS = {
    "tp2": Layout(RankGrid(tp=2)),
    "tp2 joint": Layout(RankGrid(tp=2), joint=True),
    "tp2 sequence": Layout(RankGrid(tp=2), sequence=True),
    "dp2": Layout(RankGrid(dp=2)),
    "tp4": Layout(RankGrid(tp=4)),
    "tp4 sequence": Layout(RankGrid(tp=4), sequence=True),
    "tp2 dp2": Layout(RankGrid(tp=2, dp=2)),
    "tp2 sequence dp2": Layout(RankGrid(tp=2, dp=2), sequence=True),
}


def _runs(world: int, *, slow: bool) -> list[tuple[str, str]]:
    """(layout, packing) pairs; four ranks are dear, so there both packings share one run unless asked for."""
    names = [name for name, layout in LAYOUTS.items() if layout.grid.world_size == world]
    packings = ("packed", "unpacked") if slow or world == 2 else ("mixed",)
    return [(name, packing) for name in names for packing in packings]


class Trained(NamedTuple):
    """What one rank saw in its run."""

    losses: list[float]
    norms: list[float]
    gradients: dict[int, dict[str, Tensor]]
    parameters: dict[str, Tensor]
    specs: dict[str, ShardSpec]
    updates: float


def _documents(packing: str, step: int, slot: int) -> tuple[int, ...]:
    if packing == "packed" or (packing == "mixed" and slot < GLOBAL_ROWS // 2):
        return ((9, 1, 14), (24,), (5, 5, 11), (12, 12))[(slot + step) % 4]
    return (8 + (5 * slot + 3 * step) % 17,)


def _batches(packing: str, step: int, mesh: Mesh) -> tuple[list[Batch], float]:
    """This rank's micro-batches of a step, and the number of targets in the whole global batch."""
    size = GLOBAL_ROWS // ACCUMULATION
    # a micro-batch of the whole world is `size` neighbouring slots, of which each data rank takes its share
    share = size // mesh.dp.size
    common = {"row_length": SEQ_LENGTH, "seq_length": SEQ_LENGTH, "vocab_size": BASE.config.vocab_size, "seed": step}
    mine, total = [], 0.0
    for index in range(ACCUMULATION):
        rows = [(slot, _documents(packing, step, slot)) for slot in range(index * size, (index + 1) * size)]
        total += float(make_batch(rows, **common).loss_weights_BS.sum())
        mine.append(make_batch(rows[mesh.dp.rank * share : (mesh.dp.rank + 1) * share], **common))
    return mine, total


def _train(case: Case, packing: str, mesh: Mesh) -> Trained:
    built = build(case, mesh, clip_grad_norm=0.5)
    losses, norms, gradients = [], [], {}
    for step in range(1, NUM_STEPS + 1):
        batches, targets = _batches(packing, step, mesh)
        if step in COMPARED:
            # the same sums that the step makes anew
            built.step.gradients(batches, targets)
            gradients[step] = built.gradients()
            built.flat.gradient.zero_()
        result = built.step(batches, targets, LR)
        losses.append(result.loss.item())
        norms.append(result.grad_norm.item())
    updates = built.optimizer.step_count.item()
    return Trained(losses, norms, gradients, built.parameters(), built.specs(), updates)


def _train_layouts(runs: list[tuple[str, str]]) -> dict[tuple[str, str], Trained]:
    results = {}
    for name, packing in runs:
        layout = LAYOUTS[name]
        mesh = build_mesh(layout.grid, device_type="cpu", num_kv_heads=BASE.config.num_kv_heads)
        results[name, packing] = _train(layout.case(), packing, mesh)
    return results


@functools.cache
def _ranks(world: int, slow: bool) -> list[dict[tuple[str, str], Trained]]:
    return spawn(_train_layouts, world=world, args=(_runs(world, slow=slow),), timeout=240)


def _of(name: str, packing: str) -> list[Trained]:
    world = LAYOUTS[name].grid.world_size
    slow = (name, packing) not in _runs(world, slow=False)
    return [rank[name, packing] for rank in _ranks(world, slow)]


@functools.cache
def _alone(packing: str) -> Trained:
    return _train(BASE, packing, single_process_mesh())


USUAL = _runs(2, slow=False) + _runs(4, slow=False)
every_run = pytest.mark.parametrize(
    ("name", "packing"),
    USUAL + [pytest.param(*run, marks=[pytest.mark.slow, pytest.mark.timeout(300)]) for run in _runs(4, slow=True)],
)


@every_run
def test_losses(name: str, packing: str):
    expected = torch.tensor(_alone(packing).losses)
    assert expected[-1] != expected[0]
    for rank in _of(name, packing):
        torch.testing.assert_close(torch.tensor(rank.losses), expected, rtol=0, atol=1e-5)


@every_run
@pytest.mark.parametrize("step", COMPARED)
def test_gradients_by_name(name: str, packing: str, step: int):
    expected = _alone(packing).gradients[step]
    for place, rank in enumerate(_of(name, packing)):
        assert rank.gradients[step].keys() == expected.keys()
        slices = {key: cut(expected[key], rank.specs[key]) for key in expected}
        errors = {key: relative_error(rank.gradients[step][key], part) for key, part in slices.items()}
        wrong = {key: error for key, error in errors.items() if error >= 1e-5}
        assert not wrong, f"rank {place}: {wrong}"


@every_run
def test_norm_before_clipping(name: str, packing: str):
    alone = _alone(packing)
    assert min(alone.norms) > 0.5, "clipping did nothing"
    for rank in _of(name, packing):
        torch.testing.assert_close(torch.tensor(rank.norms), torch.tensor(alone.norms), rtol=1e-5, atol=0)
        assert rank.updates == NUM_STEPS


@every_run
def test_replicas_stay_bitwise_equal(name: str, packing: str):
    """Whole tensors, and parts that several ranks hold, have the same bits wherever they are held."""
    held: dict[tuple[str, object], Tensor] = {}
    compared = 0
    for rank in _of(name, packing):
        for key, value in rank.parameters.items():
            place = (key, rank.specs[key].pieces)
            if place in held:
                compared += 1
                assert torch.equal(held[place], value), key
            held.setdefault(place, value)
    assert compared > 0


@pytest.mark.parametrize("packing", ["packed", "unpacked", "mixed"])
def test_training_moved_every_parameter(packing: str):
    alone = _alone(packing)
    before = build(BASE).parameters()
    for key, value in alone.parameters.items():
        assert not torch.equal(before[key], value), key
