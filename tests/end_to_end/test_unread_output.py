"""Runs whose output loses its reader, as behind `| head`: they train to the end, and their files are whole."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from engine.checkpoint.run.step_folders import latest_checkpoint
from tests.support.commands import REPOSITORY, losses, options
from tests.support.shared_data import write_plays
from tests.support.warm_python import warm_python

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

STEPS = 30


def _start(arguments: list[str], ranks: int) -> subprocess.Popen[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return subprocess.Popen(
        [str(warm_python()), *launcher, str(REPOSITORY / "tools" / "pretrain_lora.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_a_run_goes_on(stories_dir: Path, data_dir: Path, tmp_path: Path) -> None:
    """By itself and under torchrun; the reader leaves in the middle of training.

    The second starts after the first one's reader has left: nobody may come so late that all has been written.
    """
    text = write_plays(tmp_path / "text.txt", data_dir, 6000)
    runs = {}
    for ranks in (1, 2):
        settings = {
            "model.path": stories_dir, "data.train": text, "data.seq_length": 64, "train.steps": STEPS,
            "train.global_batch_size": 4, "checkpoint.dir": tmp_path / f"run{ranks}", "checkpoint.every": 20,
            "log.every": 1, "log.peak_tflops": 0,
        }  # fmt: skip
        process = runs[ranks] = _start(options(settings), ranks)
        assert process.stdout is not None
        seen = ""
        while not seen.startswith("run: "):
            seen = process.stdout.readline()
            assert seen, "it ended before the first step"
        process.stdout.close()
    for ranks, process in runs.items():
        folder = tmp_path / f"run{ranks}"
        assert process.wait(200) == 0, ranks
        assert sorted(losses(folder)) == list(range(1, STEPS + 1))
        saved = latest_checkpoint(folder)
        assert saved is not None and saved.name == f"step_{STEPS:08d}"
        assert not (folder / "run.lock").exists()
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        assert ["stderr has no reader" in record["note"] for record in records if "note" in record] == [True]


def test_text_that_nobody_reads_to_its_end(stories_dir: Path) -> None:
    """Answers are results: a command that could not give them all has failed, and says so by its status alone."""
    process = subprocess.Popen(
        [str(warm_python()), str(REPOSITORY / "tools" / "generate.py"), "--model", str(stories_dir), "--prompt", "Once",
         "--max-new-tokens", "400", "--ignore-eos"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(1)
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(100) == 141, errors
    assert "Traceback" not in errors and "BrokenPipe" not in errors
