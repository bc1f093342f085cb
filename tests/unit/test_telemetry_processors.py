"""The processors of a process that is bound to some of them, and of a system that does not say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.telemetry.processors import available_processors

ROOT = Path(__file__).resolve().parents[2]
BOUND = """
import os
from engine.telemetry.processors import available_processors
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
print(available_processors())
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no process to processors")
def test_a_process_bound_to_one_processor_has_one() -> None:
    command = [sys.executable, "-c", BOUND]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "1\n"


def test_a_system_that_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert available_processors() == os.cpu_count()
