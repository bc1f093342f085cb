"""The helper itself: values come back, failures carry tracebacks, hangs and deaths end, nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.spawning import RankFailure, spawn

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).resolve().parents[2]


def _sum_of_ranks(factor: int) -> torch.Tensor:
    value = torch.tensor([float(dist.get_rank() + 1)]) * factor
    dist.all_reduce(value)
    return value


def _rank_one_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the second rank is unhappy")
    dist.barrier()


def _rank_one_hangs() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)
    dist.barrier()


def _rank_one_dies() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_each_ranks_value_comes_back():
    values = spawn(_sum_of_ranks, world=2, args=(10,))
    assert [value.item() for value in values] == [30.0, 30.0]


def test_traceback_of_the_failing_rank_is_shown():
    started = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank 1: (.|\n)*_rank_one_raises(.|\n)*the second rank is unhappy"):
        spawn(_rank_one_raises, world=2)
    assert time.monotonic() - started < 20, "the other rank was waited for"
    assert multiprocessing.active_children() == []


def test_hang_is_ended_and_located():
    with pytest.raises(RankFailure, match=r"rank 1 did not end(.|\n)*_rank_one_hangs"):
        spawn(_rank_one_hangs, world=2, timeout=2)
    assert multiprocessing.active_children() == []


def test_killed_rank_is_named():
    with pytest.raises(RankFailure, match=r"rank 1: died with exit code"):
        spawn(_rank_one_dies, world=2)


def _process_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def write_pid_and_sleep(folder: str) -> None:
    Path(folder, f"pid{dist.get_rank()}").write_text(str(os.getpid()))
    dist.barrier()
    time.sleep(60)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_ranks_end_with_a_killed_test_run(tmp_path: Path):
    code = (
        "from tests.support.spawning import spawn\n"
        "from tests.distributed.test_spawning import write_pid_and_sleep\n"
        f"spawn(write_pid_and_sleep, world=2, args=({str(tmp_path)!r},))\n"
    )
    script = tmp_path / "run.py"
    script.write_text(f"if __name__ == '__main__':\n{''.join('    ' + line + chr(10) for line in code.splitlines())}")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.Popen([sys.executable, str(script)], cwd=ROOT, env=environment)
    files = [tmp_path / f"pid{rank}" for rank in range(2)]
    deadline = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline and run.poll() is None, "the ranks did not start"
        time.sleep(0.05)
    pids = [int(file.read_text()) for file in files]
    run.kill()
    run.wait()
    deadline = time.monotonic() + 10
    while any(_process_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_process_alive(pid) for pid in pids)
