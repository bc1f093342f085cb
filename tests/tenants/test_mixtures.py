"""Tenants of mixtures of experts: rows that routers send to one expert are multiplied together, whosever they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch import Batch
from engine.telemetry.log import Log
from engine.tenants import joined_batch, joint_pass, tenants
from engine.tenants.tenants import Tenants
from rankfold.benchmarking.small_run import write_small_run
from tests.support.sweeps import sampled
from tests.tenants.mixtures import ADAPTERS, APART, MODELS, batches, draw_factors, train_together
from tests.tenants.test_shared_base import configs, launched

CASES = [*((name, {}) for name in MODELS), ("qwen3 moe", {"base_dtype": "nf4"})]


@pytest.mark.parametrize(
    ("name", "model"), sampled(CASES, quick=[("deepseek v3", {}), ("qwen3 moe", {"base_dtype": "nf4"})])
)
def test_neighbours_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, model: dict[str, Any]
) -> None:
    write_small_run(tmp_path, MODELS[name])
    runs = list(enumerate(configs(tmp_path, (*ADAPTERS, APART), **model)))
    joined: list[list[int]] = []

    def join(parts: Sequence[tuple[int, Batch]]) -> Batch:
        joined.append([number for number, _ in parts])
        return joined_batch.join(parts)

    monkeypatch.setattr(joint_pass, "join", join)
    together = train_together(runs)
    assert max(map(len, joined)) >= 6 and {number for parts in joined for number in parts} == {0, 1, 2, 3, 4}
    for number, config in runs:
        alone = train_together([(number, config)])[number]
        assert alone.keys() == together[number].keys()
        for tensor, expected in alone.items():
            assert torch.equal(together[number][tensor], expected), (number, tensor)


@pytest.mark.parametrize("name", sampled(MODELS, quick=["qwen2 moe"]))
def test_gradients_are_those_of_its_own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Bit for bit: that model makes the same products."""
    write_small_run(tmp_path, MODELS[name])
    runs = configs(tmp_path, ADAPTERS)
    together = Tenants(runs[0], launched(), Log(1), tokens=200)
    for number, config in enumerate(runs):
        assert together.add(config) == number
        draw_factors(together[number], number)
        together[number].stages.step.fill_(2 + number)  # a coordinate of dropout masks

    def gradients() -> list[torch.Tensor]:
        flats = [together[number].optimizer.flat for number in range(len(runs))]
        for flat in flats:
            flat.gradient.zero_()
        given = {number: batches(number, 0) for number in range(len(runs))}
        together.gradients(given, dict.fromkeys(given, 20.0))
        return [flat.gradient.clone() for flat in flats]

    joined = gradients()
    monkeypatch.setattr(tenants, "can_join", lambda own: False)
    monkeypatch.setattr(joint_pass, "join", None)
    assert all(map(torch.equal, joined, gradients()))
