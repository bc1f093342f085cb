"""The processors of a process that is bound to some of them, and of a system that does not say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.telemetry.processors import available_processors, busy_note

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


def test_busy_processors_are_said_to_threads_that_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (7.9, 1.0, 1.0))
    assert "the 2 processors busy (load 7.9)" in str(busy_note(2)) and busy_note(1) is None
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert busy_note(2) is None
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setattr(os, "getloadavg", lambda: (2.5, 9.0, 9.0))
    assert busy_note(2) is None
