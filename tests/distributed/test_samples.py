"""Samples of text under every layout are those of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.config.load import load_config
from engine.training.trainer import train
from tests.support.commands import options, run_tool
from tests.support.shared_data import write_plays
from tests.support.sweeps import sampled

pytestmark = pytest.mark.distributed

LAYOUTS = {
    "tensor and sequence": {"parallel.tensor": 2},
    "tensor": {"parallel.tensor": 2, "parallel.sequence": "false"},
    "pipeline": {"parallel.pipeline": 2, "parallel.virtual": 2},
    "v": {"parallel.pipeline": 2, "parallel.virtual": 2, "parallel.schedule": "zb_v"},
    "context": {"parallel.context": 2},
    "parameters": {"parallel.shard": "parameters"},
}
QUICK = ("pipeline",)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, stories_dir: Path, data_dir: Path) -> dict[str, object]:
    text = write_plays(tmp_path_factory.mktemp("text") / "text.txt", data_dir, 4000)
    return {
        "model.path": stories_dir, "data.train": text, "data.seq_length": 64, "train.steps": 3, "lora.rank": 4,
        "train.micro_batch_size": 1, "train.global_batch_size": 4, "optim.lr": 3e-3, "train.sample_every": 2,
        "train.sample_prompts": '["Once upon a time", "Lily and Tom went to the park. They", "The"]',
        "train.sample_tokens": 12,
    }  # fmt: skip


def _samples(folder: Path) -> list[dict[str, object]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if any(name.startswith("sample/") for name in record)]


@pytest.fixture(scope="module")
def alone(settings: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    folder = tmp_path_factory.mktemp("alone") / "run"
    train(load_config(options({**settings, "checkpoint.dir": folder})))
    found = _samples(folder)
    assert len(found) == 9 and ", there was a" in str(found[0]["sample/1"])
    return found


@pytest.mark.parametrize("layout", sampled(LAYOUTS, QUICK))
def test_samples_are_those_of_one_process(
    layout: str, settings: dict[str, object], alone: list[dict[str, object]], tmp_path: Path
) -> None:
    run_tool("pretrain_lora", *options({**settings, "checkpoint.dir": tmp_path / "run", **LAYOUTS[layout]}), ranks=2)
    assert _samples(tmp_path / "run") == alone
