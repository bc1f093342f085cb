"""Folded adapters add columns to a weight. How far apart its rows then lie is the backend's choice, which neither the
shards that a checkpoint sees nor the gradients know of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.layers.recompute import MemoryPlan
from engine.ops.backends import NATIVE
from engine.ops.kernels import REFERENCE, Kernels, shape_backend
from tests.distributed.cases import RANK, Built, Case, relative_error, small_config
from tests.support.memory_models import build_with, packed_batches, two_alive

ADAPTED = r"layers\..*_proj"
CONFIG = small_config(hidden=64, intermediate=128, head_dim=16)
"""All widths are multiples of 64, as real models' are."""
WIDE = replace(REFERENCE, fold_multiple=64)


def _built(kernels: Kernels, base: str | None = None) -> Built:
    case = Case(config=CONFIG, adapters=ADAPTED, base=base)
    return build_with(case, MemoryPlan(), kernels=kernels, dtype=torch.float64)


def _extra_columns(built: Built) -> list[int]:
    linears = [m for m in built.model.layers.modules() if isinstance(m, ColumnParallelLinear | RowParallelLinear)]
    return [linear.operands.extended_OE.shape[1] - linear.in_features for linear in linears]


def test_rows_of_a_gpu_start_at_cache_lines_and_those_of_a_cpu_as_they_did() -> None:
    assert shape_backend("triton").fold_multiple * torch.bfloat16.itemsize == 128
    for kernels in (REFERENCE, NATIVE, shape_backend("native")):
        assert kernels.fold_multiple == 8
    ranks = [3 * RANK, RANK, 2 * RANK, RANK] * CONFIG.num_layers
    assert _extra_columns(_built(REFERENCE)) == [-(-rank // 8) * 8 for rank in ranks]
    assert _extra_columns(_built(WIDE)) == [64] * len(ranks)


@pytest.mark.parametrize("base", [None, "int8"])
def test_how_far_rows_lie_apart_is_nobodys_business(base: str | None) -> None:
    narrow, wide = _built(REFERENCE, base), _built(WIDE, base)
    assert [(entry.name, entry.spec) for entry in wide.entries] == [
        (entry.name, entry.spec) for entry in narrow.entries
    ]
    for entry, expected in zip(wide.entries, narrow.entries, strict=True):
        assert (entry.name, entry.spec) == (expected.name, expected.spec)
        assert torch.equal(entry.parameter, expected.parameter), entry.name
    batches = packed_batches(CONFIG.vocab_size)
    (loss, found), (expected_loss, gradients) = two_alive(wide, batches), two_alive(narrow, batches)
    assert relative_error(loss, expected_loss) < 1e-12
    errors = {name: relative_error(found[name], gradient) for name, gradient in gradients.items()}
    assert {name: error for name, error in errors.items() if not error < 2e-6} == {}  # they are summed in fp32
