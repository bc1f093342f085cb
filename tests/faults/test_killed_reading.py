"""A rank that is killed while it reads an image: the restarted run ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from examples.minicpm_v import make_small
from tests.faults.torchrun import Torchrun, last_step, require_same, training_records
from tests.support.commands import options, run_tool

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc"),
    pytest.mark.timeout(600),
    pytest.mark.slow,
]

RECORDS, SIDE, STEPS = 16, 1100, 24


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, object]:
    """Images that take longer to decode than the rest of a step takes; tiles of them lie on both ranks."""
    make_small.write(tmp_path / "in")
    records = json.loads((tmp_path / "in" / "train.json").read_text(encoding="utf-8"))[:RECORDS]
    (tmp_path / "in" / "train.json").write_text(json.dumps(records), encoding="utf-8")
    for number, record in enumerate(records):
        noise = np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / "in" / record["image"], compress_level=1)
    return {
        "model.path": tmp_path / "in" / "model", "model.dtype": "float32", "data.train": tmp_path / "in" / "train.json",
        "data.seq_length": 96, "data.num_workers": 2, "lora.rank": 4, "lora.targets": "q_proj,v_proj",
        "lora.dropout": 0.1, "trainable": "resampler", "optim.lr": 1e-3, "train.steps": STEPS,
        "train.micro_batch_size": 2, "train.global_batch_size": 4, "train.eval_every": 0, "checkpoint.every": 4,
        "parallel.tensor": 2, "log.every": 1,
    }  # fmt: skip


def _reader_of_a_image(pids: Iterable[int]) -> int | None:
    """One of these processes that has an image open; None where none has."""
    for pid in pids:
        with suppress(OSError):
            for handle in os.scandir(f"/proc/{pid}/fd"):
                if os.readlink(handle.path).endswith(".png"):
                    return pid
    return None


def test_two_kills_while_images_are_read(settings: dict[str, object], tmp_path: Path) -> None:
    run_tool("pretrain_lora", *options({**settings, "checkpoint.dir": tmp_path / "whole"}), ranks=2)
    with Torchrun(tmp_path, {**settings, "checkpoint.dir": tmp_path / "run"}, 2, restarts=4) as run:
        past: set[int] = set()
        for step in (6, 14):
            run.wait_for_step(step)
            pids = set(run.pids()) - past
            while (reader := _reader_of_a_image(pids)) is None:
                assert last_step(tmp_path / "run") < STEPS, "no image was being read"
                time.sleep(0.001)
            os.kill(reader, signal.SIGKILL)
            past |= pids
            while set(run.pids()) <= past:
                time.sleep(0.02)
        assert run.wait(300) == 0, run.output.read_text()
        assert run.output.read_text().count("resuming from") >= 2
    require_same(tmp_path / "run", tmp_path / "whole", STEPS)
    assert len(training_records(tmp_path / "run")) == STEPS
