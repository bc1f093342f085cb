"""A step on rows that were padded further than their samples are long: what it computes is the same.

Padding has no loss and no token sees it, so it can change nothing but how libraries round. The compiled kernels round
each row by itself, and show it: each token's loss keeps its bits.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.data.collate import rank_batch
from engine.data.dataset import dataset_of
from engine.data.row_shape import RowShape
from engine.kernels.native.loader import native_status
from engine.layers.recompute import MemoryPlan
from engine.ops.backends import NATIVE
from engine.ops.kernels import REFERENCE, Kernels
from tests.distributed.cases import Case, small_config
from tests.support.memory_models import build_with, num_targets

BACKENDS = [
    pytest.param(REFERENCE, id="reference"),
    pytest.param(
        NATIVE, id="native", marks=pytest.mark.skipif(not native_status().available, reason="no compiled kernels")
    ),
]


@pytest.mark.parametrize("kernels", BACKENDS)
def test_padding_changes_nothing(kernels: Kernels) -> None:
    case = Case(config=small_config(head_dim=8), adapters=r"layers\..*_proj", dropout=0.25)
    tokens = np.random.default_rng(0).integers(0, case.config.vocab_size, (2, 20)).tolist()
    documents = [(ids, [False] + [True] * (len(ids) - 1)) for ids in (tokens[0], tokens[1][:17])]
    dataset = dataset_of(documents, seq_length=32)
    found, results = [], []
    for multiple, length in ((1, 20), (32, 32)):
        batch = rank_batch(dataset, [0, 1], [0, 1], RowShape(length_multiple=multiple))
        assert batch.row_length == length
        built = build_with(case, MemoryPlan(), kernels=kernels)
        with torch.no_grad():
            losses = built.model(batch, torch.zeros((), dtype=torch.int64), training=True).view(2, length)
        assert losses[:, :17].any() and not losses[:, 20:].any()
        found.append(losses[:, :20])
        results.append(built.step([batch], num_targets([batch]), 1e-3))
    if kernels is NATIVE:
        assert torch.equal(*found)
    # libraries add up in an order that depends on the number of rows: 2e-6 is 16 roundings of fp32
    torch.testing.assert_close(*found, rtol=2e-6, atol=0)
    for name in ("loss", "grad_norm"):
        torch.testing.assert_close(*(getattr(result, name) for result in results), rtol=2e-6, atol=0)
