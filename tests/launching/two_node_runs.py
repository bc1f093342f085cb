"""A small run for two nodes, and what it is compared with: the same run on one machine that never stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.support.commands import REPOSITORY, losses

STEPS = 40
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


def write_run(folder: Path, model: Path) -> None:
    """Writes text.txt and run.yaml: two ranks, each with half of every layer, that save every third step."""
    (folder / "text.txt").write_text("All the world's a stage, and all the men and women merely players. " * 20)
    (folder / "run.yaml").write_text(
        f"model: {{path: {model}}}\nlora: {{rank: 2}}\ndata: {{train: {folder}/text.txt, seq_length: 32}}\n"
        f"train: {{global_batch_size: 2, steps: {STEPS}}}\nlog: {{peak_tflops: 0}}\nparallel: {{tensor: 2}}\n"
        "checkpoint: {every: 3}\n"
    )


def whole_run(folder: Path) -> Path:
    """Trains without a stop on this machine, and returns the run's folder."""
    words = ["-m", "rankfold", "train", "--nproc", "2", "--config", "run.yaml", "--checkpoint.dir", "whole"]
    done = subprocess.run([sys.executable, *words], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "whole"


def steps_of(run: Path) -> int:
    """Returns how many steps a run has reported."""
    return max(losses(run), default=0) if (run / "metrics.jsonl").is_file() else 0


def check_same_bits(run: Path, whole: Path) -> None:
    """Compares every reported loss, and all weights and optimizer states of the last checkpoint."""
    assert losses(run) == losses(whole) and len(losses(run)) == STEPS
    names = [f"rank_{rank:05}.safetensors" for rank in range(2)]
    for name in names:
        ours, theirs = (load_file(one / "checkpoints" / f"step_{STEPS:08}" / name) for one in (run, whole))
        assert ours.keys() == theirs.keys() and len(ours) > 2
        assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == [], name
        assert any("lora_B" in key and tensor.any() for key, tensor in ours.items()) or name != names[0], [*ours]
