"""A scheduler's signal: all ranks stop after one step and save, and the run goes on from there. One run a folder."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.faults.ranks import Ranks, run_settings
from tests.faults.torchrun import Torchrun, require_same
from tests.support.commands import options, run_tool

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

EXIT_STOPPED = 75


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, stories_dir: Path, data_dir: Path) -> dict[str, object]:
    common = run_settings(tmp_path_factory.mktemp("data"), stories_dir, data_dir)
    return {**common, "train.global_batch_size": 4, "lora.dropout": 0.1}


@pytest.mark.slow
def test_under_torchrun(settings: dict[str, object], tmp_path: Path) -> None:
    """SIGTERM to torchrun, which forwards it, while a checkpoint is saved after every step."""
    settings = {**settings, "train.steps": 30, "checkpoint.every": 1, "parallel.tensor": 2}
    run_tool("pretrain_lora", *options({**settings, "checkpoint.dir": tmp_path / "whole"}), ranks=2)
    settings["checkpoint.dir"] = tmp_path / "run"
    with Torchrun(tmp_path, settings, 2, restarts=3) as run:
        run.wait_for_step(3)
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.wait(60) == 1, "torchrun's own status, which docs/runs.md names"
        output = run.output.read_text()
    assert len(re.findall(r"^SIGTERM to rank [01]: the run stops after the step under way", output, re.M)) == 1, output
    stopped = re.search(r"^stopped after step (\d+), SIGTERM to rank [01]: resume with", output, re.M)
    assert stopped and "resuming" not in output and "error: " not in output, output
    assert not (tmp_path / "run" / "run.lock").exists()
    with Torchrun(tmp_path, settings, 2) as run:
        assert run.wait(240) == 0, run.output.read_text()
        assert f"after step {stopped[1]}, " in run.output.read_text()
    require_same(tmp_path / "run", tmp_path / "whole", 30)


def test_one_rank_alone_is_signalled(settings: dict[str, object], tmp_path: Path) -> None:
    with Ranks(tmp_path, {**settings, "parallel.pipeline": 2}, 2) as ranks:
        ranks.wait_for_step(2)
        ends = ranks.ends(range(2), ranks.send(1, signal.SIGUSR1), 60)
    assert [end.status for end in ends.values()] == [EXIT_STOPPED, EXIT_STOPPED], ends
    found = re.search(r"^stopped after step (\d+), SIGUSR1 to rank 1:", ends[0].output, re.M)
    assert found, ends[0].output
    assert (ranks.run_dir / "checkpoints" / f"step_{int(found[1]):08d}").is_dir()
    assert not any("Traceback" in end.output for end in ends.values())


def test_an_evaluation_is_left(settings: dict[str, object], data_dir: Path, tmp_path: Path) -> None:
    """It would take minutes; there is nothing to save before the first step."""
    whole = data_dir / "corpus" / "tinyshakespeare.txt"
    with Ranks(tmp_path, {**settings, "data.validation": whole}, 2) as ranks:
        deadline = time.monotonic() + 90
        while "\nrun: " not in (tmp_path / "rank0.txt").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1)
        ends = ranks.ends(range(2), ranks.send(0, signal.SIGTERM), 60)
    assert [end.status for end in ends.values()] == [EXIT_STOPPED, EXIT_STOPPED], ends
    assert "stopped after step 0, SIGTERM to rank 0" in ends[0].output
    assert not (ranks.run_dir / "checkpoints").exists()


def test_two_runs_in_one_folder(settings: dict[str, object], tmp_path: Path) -> None:
    with Ranks(tmp_path, settings, 1) as ranks:
        ranks.wait_for_step(1)
        again = options({**settings, "checkpoint.dir": ranks.run_dir})
        result = run_tool("pretrain_lora", *again, status=2)
        holder = ranks.processes[0].pid
        assert f"error: the run's folder {ranks.run_dir} is in use by process {holder} on " in result.stderr
        assert "Traceback" not in result.stderr
        ranks.wait_for_step(3)
