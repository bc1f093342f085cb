"""Tenants of one base: their rows are multiplied together, and each one's numbers are those that it has alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.batch import Batch
from engine.config.run import RunConfig
from engine.errors import UserError
from engine.telemetry.log import Log
from engine.tenants import joined_batch, joint_pass
from engine.tenants.tenants import Tenants
from rankfold.benchmarking.small_run import SMALL_HYBRID, SMALL_LLAMA, write_small_run
from tests.support.few_bits import draw_in_few_bits
from tests.support.small_training import packed_batch
from tests.tenants.test_shared_base import HYBRID, SMALLER, STORED, configs, launched, trained

ADAPTERS: tuple[dict[str, Any], ...] = (
    {"rank": 4, "alpha": 8},
    {"rank": 8, "alpha": 4, "dropout": 0.1, "targets": ["q_proj", "down_proj"]},
    {"rank": 1, "alpha": 3, "dropout": 0.05, "exclude": ["o_proj"]},
    {"rank": 16, "alpha": 3, "targets": ["all-linear", "lm_head"]},
    {"rank": 3, "alpha": 3, "dropout": 0.05, "dora": True},
)
STEPS = 3


def _batches(number: int, step: int) -> list[Batch]:
    """Two micro-batches, of documents and lengths that differ between tenants."""
    return [
        packed_batch([(9 + number, 12 - number)], SMALLER["vocab_size"], 100 * number + 10 * step),
        packed_batch([(5, 7 + number)], SMALLER["vocab_size"], 100 * number + 10 * step + 1),
    ]


def _train(runs: Sequence[tuple[int, RunConfig]], tokens: int) -> dict[int, dict[str, Tensor]]:
    """Trains these runs together, and returns each one's adapters."""
    tenants = Tenants(runs[0][1], launched(), Log(1), tokens=tokens)
    numbers = {number: tenants.add(config) for number, config in runs}
    for step in range(STEPS):
        batches = {own: _batches(number, step) for number, own in numbers.items()}
        targets = {own: float(sum(one.loss_weights_BS.sum() for one in rows)) for own, rows in batches.items()}
        for own, loss in tenants.gradients(batches, targets).items():
            tenants.update(own, 1e-2, loss)
    return {number: trained(tenants[own]) for number, own in numbers.items()}


@pytest.mark.parametrize("model", [{}, {"base_dtype": "nf4"}, STORED], ids=["float32", "nf4", "stored"])
def test_neighbours_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any]) -> None:
    write_small_run(tmp_path, {**SMALL_LLAMA, **SMALLER})
    if model == STORED:
        draw_in_few_bits(tmp_path, "mxfp4")
    runs = list(enumerate(configs(tmp_path, ADAPTERS[: 4 if model else 5], **model)))
    widths: list[int] = []

    def join(parts: Sequence[tuple[int, Batch]]) -> Batch:
        widths.append(len(parts))
        return joined_batch.join(parts)

    monkeypatch.setattr(joint_pass, "join", join)
    together = _train(runs, tokens=100)
    assert max(widths) >= 3
    for number, config in runs:
        alone = _train([(number, config)], tokens=100)[number]
        assert alone.keys() == together[number].keys()
        for name, tensor in alone.items():
            assert torch.equal(together[number][name], tensor), (number, name)


def test_neighbours_of_a_hybrid(tmp_path: Path) -> None:
    """Its compiled kernels add up in an order that depends on the place of a row."""
    write_small_run(tmp_path, {**SMALL_HYBRID, **HYBRID, **SMALLER})
    tenants = Tenants(configs(tmp_path)[0], launched(), Log(1), tokens=100)
    numbers = [tenants.add(config) for config in configs(tmp_path, ADAPTERS[:3])]
    batches = {number: _batches(number, 0)[:1] for number in numbers}
    for number in numbers:
        for entry in tenants[number].stages.entries():
            if entry.name.endswith("lora_B"):
                entry.parameter.data.normal_(std=0.05, generator=torch.Generator().manual_seed(number))

    def gradients(some: Sequence[int]) -> list[Tensor]:
        for number in some:
            tenants[number].optimizer.flat.gradient.zero_()
        tenants.gradients({number: batches[number] for number in some}, dict.fromkeys(some, 20.0))
        return [tenants[number].optimizer.flat.gradient.clone() for number in some]

    for number, together in zip(numbers, gradients(numbers), strict=True):
        (alone,) = gradients([number])
        assert alone.norm() > 0 and (together - alone).norm() < 1e-6 * alone.norm()


def test_joined_rows_are_no_longer_than_the_model_allows(tmp_path: Path) -> None:
    ropes = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 40}
    write_small_run(tmp_path, {**SMALL_LLAMA, **SMALLER, **ropes})
    assert len(_train(list(enumerate(configs(tmp_path, ADAPTERS[:2]))), tokens=100)) == 2


def test_what_runs_cannot_share_is_refused(tmp_path: Path) -> None:
    write_small_run(tmp_path / "text", {**SMALL_LLAMA, **SMALLER})
    (first,) = configs(tmp_path / "text", ADAPTERS[:1])
    tenants = Tenants(first, launched(), Log(1), tokens=64)
    with pytest.raises(UserError, match="the section model differs"):
        tenants.add(configs(tmp_path / "text", ADAPTERS[:1], base_dtype="nf4")[0])
    with pytest.raises(UserError, match="train.seed is 6 and of the first run 5"):
        tenants.add(replace(first, train=replace(first.train, seed=6)))
    with pytest.raises(UserError, match="lm_head.weight is to train in full"):
        tenants.add(configs(tmp_path / "text", ({"rank": 4},), trainable=["lm_head"])[0])


def test_runs_that_merge_into_their_base_share_none(tmp_path: Path) -> None:
    write_small_run(tmp_path, {**SMALL_LLAMA, **SMALLER})
    (first,) = configs(tmp_path, ADAPTERS[:1], base_dtype="int8")
    tenants = Tenants(first, launched(), Log(1), tokens=64)
    merging = replace(first, lora=replace(first.lora, dropout=0.0, merge_aware=True))
    with pytest.raises(UserError, match="lora.merge_aware is true, but runs that share a base"):
        tenants.add(merging)
