"""Under torchrun: no rank is left behind, neither where a rank is killed nor where torchrun is."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.ranks import START_SECONDS, last_step, run_command, run_environment, run_settings

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc"),
]

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@dataclass(frozen=True, kw_only=True)
class Launched:
    """torchrun and its ranks, by process id."""

    torchrun: int
    ranks: tuple[int, ...]
    output: Path


def _fields(pid: int) -> list[str] | None:
    """State, parent and so on of a process; None where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _alive(pid: int) -> bool:
    fields = _fields(pid)
    return fields is not None and fields[0] != "Z"


def _children(parent: int) -> tuple[int, ...]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return tuple(sorted(pid for pid in pids if (fields := _fields(pid)) and int(fields[1]) == parent))


def _wait_until_gone(pids: tuple[int, ...], limit: float) -> list[int]:
    """Those of `pids` that are alive after `limit` seconds."""
    deadline = time.monotonic() + limit
    while any(map(_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [pid for pid in pids if _alive(pid)]


@contextmanager
def _launched(folder: Path, stories_dir: Path, data_dir: Path) -> Iterator[Launched]:
    """A run under a torchrun whose own parent has ended, once it has taken a step; killed on leaving."""
    settings = {**run_settings(folder, stories_dir, data_dir), "parallel.tensor": 2, "checkpoint.dir": folder / "run"}
    output = folder / "output.txt"
    # the shell starts it, says its id and ends
    shell = ["sh", "-c", f'"$@" > {output} 2>&1 & echo $!', "sh", *run_command(settings, *TORCHRUN)]
    said = subprocess.run(shell, env=run_environment(), stdout=subprocess.PIPE, text=True, check=True, timeout=30)
    torchrun, ranks = int(said.stdout), ()
    try:
        deadline = time.monotonic() + START_SECONDS
        while last_step(folder / "run") < 2:
            assert _alive(torchrun) and time.monotonic() < deadline, output.read_text()
            time.sleep(0.05)
        ranks = _children(torchrun)
        assert len(ranks) == 2
        yield Launched(torchrun=torchrun, ranks=ranks, output=output)
    finally:
        for pid in (torchrun, *ranks):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_killed_torchrun_takes_its_ranks_with_it(tmp_path: Path, stories_dir: Path, data_dir: Path) -> None:
    """Also a rank that is stopped, and so can do nothing itself."""
    with _launched(tmp_path, stories_dir, data_dir) as run:
        os.kill(run.ranks[1], signal.SIGSTOP)
        os.kill(run.torchrun, signal.SIGKILL)
        assert _wait_until_gone((run.torchrun, *run.ranks), 5) == []


def test_killed_rank_under_torchrun(tmp_path: Path, stories_dir: Path, data_dir: Path) -> None:
    with _launched(tmp_path, stories_dir, data_dir) as run:
        os.kill(run.ranks[1], signal.SIGKILL)
        assert _wait_until_gone((run.torchrun, *run.ranks), 20) == []
        output = run.output.read_text()
    # torchrun ends the other rank itself, on a busy machine before it has noticed
    assert output.count("\nerror: after step") <= 1, output  # torchrun's report may have it once more
    assert output.count("Traceback") == 1, "torchrun's own report has one, the ranks have none\n" + output
    cause = output.partition("Root Cause")[2]
    assert re.search(r"rank +: 1 .*\n.*exitcode +: -9 ", cause), output
