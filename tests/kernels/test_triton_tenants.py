"""Tenants of one base with Triton's kernels: adapters of each span of tokens, as the reference has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from engine.telemetry.log import Log
from engine.tenants.tenants import Tenants
from rankfold.benchmarking.small_run import SMALL_LLAMA, write_small_run
from tests.support.small_training import packed_batch
from tests.tenants.test_shared_base import SMALLER, configs, launched

ADAPTERS = ({"rank": 4, "alpha": 8}, {"rank": 1, "alpha": 3, "dropout": 0.1, "targets": ["q_proj", "down_proj"]})
TINY = {**SMALL_LLAMA, **SMALLER, "hidden_size": 32, "head_dim": 16, "num_attention_heads": 2, "num_hidden_layers": 1}


def _gradients(folder: Path, kernels: str, chosen: tuple[int, ...]) -> dict[int, Tensor]:
    """Returns the gradients of these tenants, whose factors B are drawn, from one pass."""
    runs = configs(folder, ADAPTERS, kernels=kernels)
    tenants = Tenants(runs[0], launched(), Log(1), tokens=64)
    numbers = [tenants.add(config) for config in runs]
    for number in numbers:
        for entry in tenants[number].stages.entries():
            if entry.name.endswith("lora_B"):
                entry.parameter.data.normal_(std=0.05, generator=torch.Generator().manual_seed(number))
    batches = {numbers[one]: [packed_batch([(7, 4 + one)], SMALLER["vocab_size"], one)] for one in chosen}
    tenants.gradients(batches, dict.fromkeys(batches, 9.0))
    return {one: tenants[numbers[one]].optimizer.flat.gradient.clone() for one in chosen}


def test_neighbours_and_the_reference(tmp_path: Path) -> None:
    write_small_run(tmp_path, TINY)
    together, expected = (_gradients(tmp_path, kernels, (0, 1)) for kernels in ("triton", "reference"))
    for one in (0, 1):
        (alone,) = _gradients(tmp_path, "triton", (one,)).values()
        assert alone.norm() > 0 and torch.equal(together[one], alone)
        assert (alone - expected[one]).norm() < 1e-5 * alone.norm()
