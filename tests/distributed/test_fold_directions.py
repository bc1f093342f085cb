"""Linears that fold their adapters in one direction alone, on two ranks: the loss and all gradients are those of
adapters apart.

A backend may fold forward and not backward, or the other way round, so that H leaves one way of multiplying and comes
to another. Everything is computed in fp64 here and gradients are summed in fp32, so that the ways differ by that sum's
rounding.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from engine.distributed.mesh import build_mesh
from engine.distributed.ranks import RankGrid
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.layers.recompute import MemoryPlan
from engine.ops.kernels import REFERENCE, Folds
from engine.ops.products import FOLDED, SEPARATE
from tests.distributed.cases import Case, make_batch, relative_error
from tests.distributed.gradient_table import CASES
from tests.distributed.run_cases import BLOCKS
from tests.support.memory_models import build_with
from tests.support.spawning import spawn

pytestmark = pytest.mark.distributed

SEPARATELY = Folds(forward=False, backward=False)
DIRECTIONS = (Folds(True, False), Folds(False, True), Folds(True, True))
ADAPTED = r"layers\..*_proj"
"""Not the head, which stays as it is where the base is encoded."""
ENCODED = Case(config=BLOCKS, adapters=ADAPTED, sequence_parallel=True)
LAYOUTS = {
    "sequence": CASES["adapters sequence"],
    "joint": CASES["adapters joint"],
    "one adapter of several sections": CASES["fused sequence"],
    "nf4": replace(ENCODED, base="nf4"),
    "int8": replace(ENCODED, base="int8"),
    "nf4, joint": replace(ENCODED, base="nf4", sequence_parallel=False, joint=True),
}
TOLERANCE = 2e-6
"""A gradient is a sum of two products, each rounded to fp32 once: some times 2^-24 of the larger one."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What one direction gave on this rank.

    Args:
        ways: how linears of the layers multiply, forward and backward: whether that is folded.
        loss: summed over the rank's tokens.
        gradients: by name.
    """

    ways: set[tuple[bool, bool]]
    loss: Tensor
    gradients: dict[str, Tensor]


def _found(case: Case, folds: Folds) -> Found:
    mesh = build_mesh(RankGrid(tp=2), device_type="cpu", num_kv_heads=case.config.num_kv_heads)
    kernels = replace(REFERENCE, folds=lambda num_inputs, num_outputs, dtype: folds)
    built = build_with(case, MemoryPlan(), mesh, kernels=kernels, dtype=torch.float64)
    ways = set()
    for module in built.model.layers.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            operands = module.operands
            assert (operands.encoded is not None) == (case.base is not None)
            assert {operands.forward_way, operands.backward_way} <= {FOLDED, SEPARATE}
            ways.add((operands.forward_way is FOLDED, operands.backward_way is FOLDED))
    batch = make_batch([(0, (9, 1, 14)), (1, (24,))], row_length=24, seq_length=24, vocab_size=131, seed=1)
    built.stage.load([batch], float(batch.loss_weights_BS.sum()))
    built.stage.forward(0)
    built.stage.backward(0)
    return Found(ways=ways, loss=built.stage.loss_sum.clone(), gradients=built.gradients())


def _compare() -> dict[tuple[str, Folds], tuple[set[tuple[bool, bool]], float, dict[str, float]]]:
    """By layout and direction: the ways taken, the error of the loss, and that of each gradient."""
    errors = {}
    for name, case in LAYOUTS.items():
        expected = _found(case, SEPARATELY)
        assert expected.ways == {(False, False)}
        for folds in DIRECTIONS:
            found = _found(case, folds)
            assert found.gradients.keys() == expected.gradients.keys()
            gradients = {one: relative_error(value, expected.gradients[one]) for one, value in found.gradients.items()}
            errors[name, folds] = found.ways, relative_error(found.loss, expected.loss), gradients
    return errors


@functools.cache
def _ranks() -> list[dict[tuple[str, Folds], tuple[set[tuple[bool, bool]], float, dict[str, float]]]]:
    return spawn(_compare, world=2, timeout=110)


@pytest.mark.parametrize("folds", DIRECTIONS, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_direction_may_be_folded_alone(name: str, folds: Folds) -> None:
    for rank in _ranks():
        ways, loss, gradients = rank[name, folds]
        assert ways == {tuple(folds)}
        assert loss < TOLERANCE
        assert len(gradients) >= 14
        assert {one: error for one, error in gradients.items() if not error < TOLERANCE} == {}
