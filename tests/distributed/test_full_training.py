"""Parameters trained in full, against stock transformers with torch's own AdamW and clipping: ten steps, fp32.

The head alone, everything, and everything with a tied head; on one process and on two ranks.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from engine.batch import Batch
from engine.distributed.mesh import Mesh, build_mesh, single_process_mesh
from engine.distributed.ranks import RankGrid
from engine.distributed.sharding import ShardSpec
from tests.distributed.cases import Case, build, cut, make_batch, relative_error
from tests.distributed.stock_models import (
    decoder_config,
    stock_model,
    stock_parameter,
    stock_token_losses,
)
from tests.support.spawning import spawn

pytestmark = pytest.mark.distributed

NUM_STEPS = 10
LR, DECAY, CLIP = 3e-3, 0.1, 0.5

MODELS = {
    "head alone": ("grouped heads", "lm_head"),
    "everything": ("biases", ".*"),
    "everything tied": ("tied", ".*"),
    "norms and head": ("query and key norm", ".*norm|lm_head"),
}
LAYOUTS = {
    "one process": (RankGrid(), False),
    "tp2": (RankGrid(tp=2), False),
    "tp2 sequence": (RankGrid(tp=2), True),
    "dp2": (RankGrid(dp=2), False),
}
"""Grid, and whether with sequence parallelism. With dp a tied matrix's bucket must wait for both of its uses."""


class Trained(NamedTuple):
    """A run's losses, norms before clipping, and final parameters (this rank's part, where there is a spec)."""

    losses: Tensor
    norms: Tensor
    parameters: dict[str, Tensor]
    specs: dict[str, ShardSpec]


def _case(name: str) -> Case:
    stock, trained = MODELS[name]
    return Case(config=decoder_config(stock), trained=trained)


def _batches(step: int, rank: int = 0, size: int = 1) -> list[Batch]:
    """Two micro-batches of two rows, of which each of `size` data-parallel ranks takes its share."""
    common = {"row_length": 24, "seq_length": 24, "vocab_size": 131, "seed": step % 3}
    rows = [[(0, (9, 15)), (1, (20,))], [(2, (24,)), (3, (4, 7, 13))]]
    return [make_batch(micro[rank::size], **common) for micro in rows]


def _num_targets(step: int) -> float:
    return float(sum(batch.loss_weights_BS.sum() for batch in _batches(step)))


def _train(case: Case, mesh: Mesh, *, sequence: bool) -> Trained:
    built = build(replace(case, sequence_parallel=sequence), mesh, weight_decay=DECAY, clip_grad_norm=CLIP)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        result = built.step(_batches(step, mesh.dp.rank, mesh.dp.size), _num_targets(step), LR)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    return Trained(torch.stack(losses), torch.stack(norms), built.parameters(), built.specs())


def _train_all(cases: dict[str, Case]) -> dict[tuple[str, str], Trained]:
    results = {}
    for layout, (grid, sequence) in LAYOUTS.items():
        if grid.world_size == 2:
            mesh = build_mesh(grid, device_type="cpu", num_kv_heads=2)
            results |= {(name, layout): _train(case, mesh, sequence=sequence) for name, case in cases.items()}
    return results


@functools.cache
def _two_ranks() -> list[dict[tuple[str, str], Trained]]:
    return spawn(_train_all, world=2, args=({name: _case(name) for name in MODELS},))


@functools.cache
def _ranks(name: str, layout: str) -> list[Trained]:
    if LAYOUTS[layout][0].world_size == 1:
        return [_train(_case(name), single_process_mesh(), sequence=False)]
    return [rank[name, layout] for rank in _two_ranks()]


@functools.cache
def _stock(name: str) -> Trained:
    case = _case(name)
    model = stock_model(MODELS[name][0], case)
    model.requires_grad_(False)
    trained = {key: stock_parameter(model, key).requires_grad_() for key in build(case).gradients()}
    groups = [
        {"params": [value for value in trained.values() if value.dim() > 1], "weight_decay": DECAY},
        {"params": [value for value in trained.values() if value.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.99), eps=1e-8)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        loss = torch.stack([stock_token_losses(model, batch).sum() for batch in _batches(step)]).sum()
        loss = loss / _num_targets(step)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), CLIP))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    parameters = {key: value.detach() for key, value in trained.items()}
    return Trained(torch.stack(losses), torch.stack(norms), parameters, {})


every_run = pytest.mark.parametrize(
    ("name", "layout"), [(name, layout) for name in MODELS for layout in LAYOUTS], ids=lambda value: str(value)
)


@every_run
def test_losses(name: str, layout: str):
    expected = _stock(name).losses
    assert expected[-1] < expected[0] - 0.01, "nothing was learned"
    for rank in _ranks(name, layout):
        torch.testing.assert_close(rank.losses, expected, rtol=0, atol=1e-5)


@every_run
def test_norms_before_clipping(name: str, layout: str):
    expected = _stock(name).norms
    assert (expected > CLIP).any(), "clipping did nothing"
    for rank in _ranks(name, layout):
        torch.testing.assert_close(rank.norms, expected, rtol=2e-5, atol=0)


@every_run
def test_final_parameters(name: str, layout: str):
    stock = _stock(name)
    for rank in _ranks(name, layout):
        assert rank.parameters.keys() == stock.parameters.keys()
        errors = {
            key: relative_error(rank.parameters[key], cut(stock.parameters[key], spec))
            for key, spec in rank.specs.items()
        }
        assert max(errors.values()) < 1e-5, {key: error for key, error in errors.items() if error >= 1e-5}


def test_frozen_parameters_stay(name: str = "head alone"):
    case = _case(name)
    built = build(case, weight_decay=DECAY)
    before = {entry.name: entry.parameter.data.clone() for entry in built.entries}
    batches = _batches(0)
    built.step(batches, 10.0, LR)
    moved = {entry.name for entry in built.entries if not torch.equal(before[entry.name], entry.parameter.data)}
    assert moved == {"lm_head.weight"}
