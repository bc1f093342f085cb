"""A run of a model with gated delta nets is killed and resumed: in its own layout with the same bits, and in others."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch

from engine.checkpoint.run.step_folders import checkpoint_folder
from tests.faults.ranks import last_step, run_command, run_environment
from tests.faults.torchrun import require_same
from tests.support.commands import losses, options, run_tool
from tests.support.family_models import make_model
from tests.support.shared_data import write_plays

STEPS, STOP = 12, 5

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, stories_dir: Path, data_dir: Path) -> dict[str, object]:
    """Packed documents, adapters on every linear with dropout, and the mixers' small parameters trained in full."""
    folder = tmp_path_factory.mktemp("model")
    vocabulary = json.loads((stories_dir / "config.json").read_text())["vocab_size"]
    make_model("qwen3.5", folder, vocab_size=vocabulary, max_position_embeddings=256)
    for file in stories_dir.iterdir():
        if file.name.startswith(("tokenizer", "special")):
            shutil.copy(file, folder / file.name)
    text = write_plays(tmp_path_factory.mktemp("text") / "text.txt", data_dir, 6000)
    return {
        "model.path": folder, "model.dtype": "float32", "data.train": text, "data.seq_length": 64,
        "train.steps": STEPS, "train.micro_batch_size": 2, "train.global_batch_size": 4, "lora.dropout": 0.1,
        "optim.lr": 3e-3, "optim.weight_decay": 0.01, "checkpoint.every": STOP, "checkpoint.keep": 0,
        "trainable": "A_log,dt_bias,conv1d",
    }  # fmt: skip


@pytest.fixture(scope="module")
def whole_run(settings: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing stops, on one process."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run_tool("pretrain_lora", *options(settings), "--checkpoint.dir", folder)
    return folder


def test_a_killed_run_goes_on_with_the_same_bits(settings: dict[str, object], whole_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = run_command({**settings, "checkpoint.dir": folder})
    with subprocess.Popen(command, env=run_environment(), stdout=subprocess.DEVNULL) as run:
        limit = time.monotonic() + 200
        while not checkpoint_folder(folder, STOP).is_dir() and run.poll() is None and time.monotonic() < limit:
            time.sleep(0.01)
        run.kill()
    assert checkpoint_folder(folder, STOP).is_dir() and run.returncode == -9 and last_step(folder) < STEPS
    run_tool("pretrain_lora", *options(settings), "--checkpoint.dir", folder)
    require_same(folder, whole_run, STEPS)


LAYOUTS: dict[str, dict[str, object]] = {
    "tensor 2": {"parallel.tensor": 2},
    "context 2": {"parallel.context": 2},
    "pipeline 2": {"parallel.pipeline": 2},
    "zero 3": {"parallel.shard": "parameters"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_goes_on_in_another_layout(
    layout: str, settings: dict[str, object], whole_run: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(checkpoint_folder(whole_run, STOP), checkpoint_folder(folder, STOP))
    lines = (whole_run / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[: STOP + 2]), encoding="utf-8")
    run_tool("pretrain_lora", *options({**settings, **LAYOUTS[layout]}), "--checkpoint.dir", folder, ranks=2)
    found, expected = losses(folder), losses(whole_run)
    assert found.keys() == expected.keys() and len(found) == STEPS
    errors = [abs(found[step] - expected[step]) / expected[step] for step in range(STOP + 1, STEPS + 1)]
    print(f"\n{layout:12} {max(errors):.1e}")
    assert max(errors) < 2e-6, torch.tensor(errors)
