"""Runs by the command line with weights and optimizer state in host memory: the numbers of the run without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.checkpoint.run.step_folders import checkpoint_folder
from engine.checkpoint.run.training_state import TrainingCheckpoint
from tests.support.commands import losses, options, run_tool
from tests.support.shared_data import write_plays

STEPS = 3
OFFLOAD = {"memory.offload_weights": "true", "memory.offload_optimizer": "true"}

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, stories_dir: Path, data_dir: Path) -> dict[str, object]:
    text = write_plays(tmp_path_factory.mktemp("text") / "text.txt", data_dir, 6000)
    return {
        "model.path": stories_dir, "data.train": text, "data.seq_length": 64, "train.steps": STEPS,
        "train.micro_batch_size": 1, "train.global_batch_size": 4, "lora.rank": 4, "optim.lr": 1e-3,
        "guards.liveness_steps": 3, "guards.replicas_every": 1,
    }  # fmt: skip


def _state(run: Path) -> dict[str, torch.Tensor]:
    checkpoint = TrainingCheckpoint(checkpoint_folder(run, STEPS))
    return {name: checkpoint.read_whole(name).clone() for name in checkpoint.tensor_names()}


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (0, {}),
        (2, {"parallel.shard": "gradients"}),
        pytest.param(2, {"parallel.tensor": 2}, marks=pytest.mark.slow),
    ],
)
def test_the_run_is_the_same(
    settings: dict[str, object], tmp_path: Path, ranks: int, layout: dict[str, object]
) -> None:
    for name, more in (("plain", {}), ("offloaded", OFFLOAD)):
        given = {**settings, **layout, **more, "checkpoint.dir": tmp_path / name}
        result = run_tool("pretrain_lora", *options(given), ranks=ranks)
        said = result.stdout + result.stderr
        assert ("in host memory on rank 0: " in said) == (name == "offloaded"), said
    assert losses(tmp_path / "offloaded") == losses(tmp_path / "plain")
    expected, found = _state(tmp_path / "plain"), _state(tmp_path / "offloaded")
    assert found.keys() == expected.keys() and expected
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_what_does_not_go_together_is_one_sentence(settings: dict[str, object], tmp_path: Path) -> None:
    given = {**settings, **OFFLOAD, "parallel.shard": "parameters", "checkpoint.dir": tmp_path / "run"}
    result = run_tool("pretrain_lora", *options(given), status=2)
    said = result.stdout + result.stderr
    assert "memory.offload_weights is true and parallel.shard is parameters" in said and "Traceback" not in said


def test_so_many_skipped_steps_end_the_run(settings: dict[str, object], tmp_path: Path) -> None:
    """Counted each step, also where only some are reported: a learning rate that breaks the weights in step 1."""
    given = {
        **settings, **OFFLOAD, "optim.lr": 1e38, "optim.max_skipped_steps": 2, "train.steps": 8, "log.every": 6,
        "checkpoint.dir": tmp_path / "run",
    }  # fmt: skip
    result = run_tool("pretrain_lora", *options(given), status=2)
    said = result.stdout + result.stderr
    assert "the last 2 steps up to step 3 had a loss or gradient that is not finite" in said, said
    assert "Traceback" not in said
