"""The section guards of tools/benchmark.py: its arithmetic by hand, and the whole command at a tiny size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rankfold.benchmarking.guards import ALL, GUARDED, LOOK, PLAIN, TRAINED, Timed, table
from rankfold.benchmarking.sections import GuardsOptions

ROOT = Path(__file__).resolve().parents[2]


def test_shares_of_a_step():
    """A step of 100 ms; 0.2 ms every step, 20 ms every 100 steps, 300 ms every 1000 steps: 0.2 + 0.2 + 0.3 percent."""
    samples = {
        PLAIN: [Timed(0.1, 0.0, 0.08, 0.0)] * 3,
        GUARDED: [Timed(0.101, 0.0002, 0.08, 0.0004)] * 3,
        TRAINED: [Timed(0.02, 0.02, 0.008, 0.008)] * 3,
        ALL: [Timed(0.3, 0.3, 0.08, 0.08)] * 3,
        LOOK: [Timed(0.01, 0.01, 0.01, 0.01)] * 3,
    }
    found = table(GuardsOptions(repeats=3), samples, "kernels: none")
    assert found.data["shares"] == pytest.approx([0.007, 0.005 + 0.001 + 0.001])
    assert found.findings[0] == "Guards take 0.70% of a step in all by the clock, 0.70% by CPU time."
    assert [row[-1] for row in found.rows] == ["", "", "0.200%", "0.200%", "0.300%", ""]
    assert "1.0100 by the clock, 1.0000 by CPU time" in found.findings[1]


@pytest.mark.distributed
@pytest.mark.slow
def test_the_command(tmp_path: Path):
    sizes = "--hidden 32 --layers 1 --heads 4 --kv-heads 2 --intermediate 48 --vocab 131 --rank 4 --rows 1 --length 16"
    file = tmp_path / "guards.json"
    done = subprocess.run(
        [sys.executable, "tools/benchmark.py", "guards", *sizes.split(), "--repeats", "2", "--warmup", "0",
         "--json", str(file)],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, timeout=110, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seconds = json.loads(file.read_text())["seconds"]
    assert set(seconds) == {PLAIN, GUARDED, TRAINED, ALL, LOOK}
    assert all(len(samples) == 2 and min(sample[0] for sample in samples) > 0 for samples in seconds.values())
