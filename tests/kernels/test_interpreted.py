"""The interpreted kernel tests, in a process of their own where this one imported Triton too early for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.comparing import TOO_LATE

INTERPRETED = "cpu- or triton-float32 or sixteen_bits"
"""What pytest selects: the tests that `comparing.interpreted_only` marks."""
FOLDER = Path(__file__).resolve().parent


@pytest.mark.skipif(not TOO_LATE, reason="they run in this process, or there is nothing to interpret")
@pytest.mark.timeout(900)
def test_interpreted_kernels() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", str(FOLDER), "-k", INTERPRETED]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=FOLDER.parents[1], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-1000:]
    summary = done.stdout.strip().splitlines()[-1]
    assert "passed" in summary and "skipped" not in summary, summary
