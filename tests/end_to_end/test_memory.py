"""The memory section of a run through the command line: the same losses at every level, and what rounding says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.commands import losses, options, run_tool
from tests.support.shared_data import write_plays

pytestmark = pytest.mark.distributed

STEPS = 4


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, stories_dir: Path, data_dir: Path) -> dict[str, object]:
    text = write_plays(tmp_path_factory.mktemp("text") / "text.txt", data_dir, 6000)
    return {
        "model.path": stories_dir, "data.train": text, "data.seq_length": 64, "train.steps": STEPS,
        "train.micro_batch_size": 2, "train.global_batch_size": 4, "lora.dropout": 0.1, "optim.lr": 3e-3,
    }  # fmt: skip


@pytest.fixture(scope="module")
def usual(settings: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of a run that says nothing of memory."""
    folder = tmp_path_factory.mktemp("usual") / "run"
    run_tool("pretrain_lora", *options({**settings, "checkpoint.dir": folder}))
    return losses(folder)


@pytest.mark.parametrize(
    "memory",
    [
        {"memory.recompute": "none"},
        {"memory.recompute": "attention"},
        {"memory.recompute": "full"},
        {"memory.recompute": "full", "memory.recompute_layers": 2},
    ],
    ids=lambda memory: " ".join(map(str, memory.values())),
)
def test_a_level_changes_no_loss(
    memory: dict[str, object], settings: dict[str, object], usual: dict[int, float], tmp_path: Path
) -> None:
    result = run_tool("pretrain_lora", *options({**settings, **memory, "checkpoint.dir": tmp_path / "run"}))
    assert losses(tmp_path / "run") == usual
    assert "activations kept as" not in result.stdout + result.stderr


def test_rounding_is_reported_once(settings: dict[str, object], usual: dict[int, float], tmp_path: Path) -> None:
    memory = {"memory.recompute": "attention", "memory.activation_dtype": "float8"}
    result = run_tool("pretrain_lora", *options({**settings, **memory, "checkpoint.dir": tmp_path / "run"}))
    lines = re.findall(
        r"step 1: activations kept as float8_e4m3fn: .* in place of .* a micro-batch, rms relative error (\S+)",
        result.stdout + result.stderr,
    )
    assert len(lines) == 1 and float(lines[0]) == pytest.approx(2.64e-2, rel=0.05)
    found = losses(tmp_path / "run")
    assert found.keys() == usual.keys() and found[1] == usual[1] and found != usual
    # an update is off by a few times the rounding, so what the updates change in the loss is too
    bound = 5 * float(lines[0]) * max(abs(usual[step] - usual[1]) for step in usual)
    assert max(abs(found[step] - usual[step]) for step in usual) < bound


@pytest.mark.parametrize("axis", ["pipeline", "context"])
def test_everything_made_again_on_two_ranks(
    axis: str, settings: dict[str, object], usual: dict[int, float], tmp_path: Path
) -> None:
    """A pipeline holds several micro-batches at a time; attention between ranks sends its keys again."""
    changes = {"memory.recompute": "full", f"parallel.{axis}": 2, "checkpoint.dir": tmp_path / "run"}
    run_tool("pretrain_lora", *options({**settings, **changes}), ranks=2)
    found = losses(tmp_path / "run")
    assert found.keys() == usual.keys() and max(abs(found[step] - usual[step]) for step in usual) < 1e-4


def test_offload_is_refused_on_a_cpu(settings: dict[str, object], tmp_path: Path) -> None:
    memory = {"memory.offload_activations": "true", "checkpoint.dir": tmp_path / "run"}
    result = run_tool("pretrain_lora", *options({**settings, **memory}), status=2)
    assert "memory.offload_activations is true and the device is cpu" in result.stdout + result.stderr
