"""A rank that is stopped is reported while the others wait for it: who waits in what, who never came, and stacks."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from tests.faults.ranks import Ranks, last_step, run_settings

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc"),
]


def _report(folder: Path, rank: int) -> str | None:
    lines = (folder / f"rank{rank}.txt").read_text(encoding="utf-8").splitlines()
    return next((line for line in lines if line.startswith("warning: nothing has happened")), None)


def test_stopped_rank(tmp_path: Path, stories_dir: Path, data_dir: Path) -> None:
    """The report comes before the collective timeout, the run goes on afterwards."""
    settings = {
        **run_settings(tmp_path, stories_dir, data_dir), "parallel.tensor": 2, "train.hang_report_after": 5,
        "train.collective_timeout": 200,
    }  # fmt: skip
    stopped, other = 1, 0
    with Ranks(tmp_path, settings, 2) as ranks:
        ranks.wait_for_step(2)
        ranks.send(stopped, signal.SIGSTOP)
        deadline = time.monotonic() + 60
        while (sentence := _report(tmp_path, other)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        step = last_step(ranks.run_dir)
        pid = ranks.processes[stopped].pid
        pattern = (
            rf"warning: nothing has happened for 5 s: rank {other} waits in (all_gather|reduce_scatter|all_reduce), "
            rf"operation \d+ of axis tp of ranks 0, 1, for engine\.[\w.]+ after step (\d+), since \d+ s, and rank "
            rf"{stopped} never came: it does not answer \(its process {pid} is stopped\), and was last in [\w.]+ after "
            rf"step \d+; each rank's stack is in .*hangs\."
        )
        found = re.fullmatch(pattern, sentence)
        assert found, sentence
        assert int(found[2]) >= step
        text = (ranks.run_dir / "hangs" / f"rank_{other:05d}.txt").read_text(encoding="utf-8")
        assert "thread MainThread" in text and "collectives.py" in text and "last operations" in text
        ranks.send(stopped, signal.SIGCONT)
        ranks.wait_for_step(step + 2)
        output = (tmp_path / f"rank{other}.txt").read_text(encoding="utf-8")
        assert f"rank {other} continues after" in output and output.count("warning: nothing") == 1
