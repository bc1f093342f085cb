"""With FP8 weights by row, x crosses the ranks in codes: with the bits of numbers that are quantised on arrival."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from engine.distributed.mesh import build_mesh
from engine.distributed.ranks import RankGrid
from engine.layers.recompute import MemoryPlan
from engine.ops.encoded_weight import EncodedWeight
from tests.distributed.cases import Case, make_batch, small_config
from tests.distributed.communication_log import communication_log
from tests.support.memory_models import build_with
from tests.support.spawning import spawn

pytestmark = pytest.mark.distributed

CASES = {
    "adapters": Case(
        config=small_config(), adapters=r"layers\..*_proj", base="fp8_row", sequence_parallel=True, dropout=0.1
    ),
    "no adapters below": Case(
        config=small_config(), adapters=r"layers\.1\..*o_proj", base="fp8_row", sequence_parallel=True
    ),
}


def _step(case: Case) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients, and the bytes that gathers of column linears brought."""
    mesh = build_mesh(RankGrid(tp=2), device_type="cpu", num_kv_heads=2)
    built = build_with(case, MemoryPlan(), mesh)
    batch = make_batch([(0, (9, 1, 14)), (1, (24,))], row_length=24, seq_length=24, vocab_size=131, seed=1)
    built.stage.load([batch], float(batch.loss_weights_BS.sum()))
    with communication_log() as log:
        built.stage.forward(0)
        built.stage.backward(0)
    return built.gradients(), len([one for one in log if one.operation == "all_gather"])


def _compare() -> dict[str, tuple[bool, int, int]]:
    found = {}
    for name, case in CASES.items():
        codes, gathers = _step(case)
        with patch.object(EncodedWeight, "by_row", property(lambda weight: False)):
            numbers, fewer = _step(case)
        assert codes.keys() == numbers.keys() and codes
        found[name] = all(torch.equal(value, numbers[key]) for key, value in codes.items()), gathers, fewer
    return found


def test_codes_travel_with_the_bits_of_numbers() -> None:
    for rank in spawn(_compare, world=2):
        assert all(equal for equal, _, _ in rank.values()), rank
        # scales are a gather of their own, in each of the two column linears of both layers
        assert all(gathers == fewer + 4 for _, gathers, fewer in rank.values()), rank
