"""Steps on made-up tokens leave no trace, and a run ends at its target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.run.step_folders import latest_checkpoint
from tests.support.commands import options, run_tool

TEXT = "Once upon a time there was a little dog. He liked to play with the ball and to run in the park. " * 60


def run(folder: Path, name: str, model: Path, *, ranks: int = 0, **more: object) -> tuple[list[dict[str, Any]], str]:
    """Metrics without times, and what the run said."""
    (folder / "text.txt").write_text(TEXT)
    chosen = {
        "model.path": model, "lora.rank": 4, "lora.dropout": 0.1, "data.train": folder / "text.txt",
        "data.validation": folder / "text.txt", "data.seq_length": 32, "data.packing": "concatenate", "optim.lr": 1e-2,
        "train.steps": 6, "train.global_batch_size": 4, "train.eval_every": 2, "train.eval_samples": 4,
        "checkpoint.dir": folder / name,
    }  # fmt: skip
    chosen |= {key.replace("__", "."): value for key, value in more.items()}
    result = run_tool("pretrain_lora", *options(chosen), ranks=ranks)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    kept = ("step", "loss", "grad_norm", "eval_loss")
    seen = [{key: record[key] for key in kept if key in record} for record in map(json.loads, lines)]
    seen = [record for record in seen if len(record) > 1]  # some are about checkpoints
    return seen, result.stdout + result.stderr


def state(folder: Path) -> dict[str, bytes]:
    checkpoint = latest_checkpoint(folder)
    assert checkpoint is not None
    return {path.name: path.read_bytes() for path in checkpoint.glob("*.safetensors")}


@pytest.mark.distributed
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("ranks", "shard"), [(0, "none"), (2, "parameters")])
def test_no_trace(tmp_path: Path, stories_dir: Path, ranks: int, shard: str) -> None:
    """Losses, norms, masters and moments have the bits of the run without."""
    plain, _ = run(tmp_path, "plain", stories_dir, ranks=ranks, parallel__shard=shard)
    warm, said = run(tmp_path, "warm", stories_dir, ranks=ranks, parallel__shard=shard, train__synthetic_steps=2)
    assert said.index("warm-up: 2 steps on synthetic tokens") < said.index("training data:")
    assert [record for record in plain if "loss" in record] and warm == plain
    assert state(tmp_path / "warm") == state(tmp_path / "plain")


@pytest.mark.timeout(600)
def test_target(tmp_path: Path, stories_dir: Path) -> None:
    """The first evaluation at or below it is the end, also for the same command once more."""
    full, _ = run(tmp_path, "full", stories_dir, train__eval_first=2)
    losses = {record["step"]: record["eval_loss"] for record in full if "eval_loss" in record}
    assert sorted(losses) == [2, 4, 6] and losses[2] > losses[4] > losses[6]
    for _ in range(2):
        found, _ = run(
            tmp_path, "target", stories_dir, train__eval_first=2, train__target_eval_loss=(losses[2] + losses[4]) / 2
        )
        assert found == [record for record in full if record["step"] <= 4]
