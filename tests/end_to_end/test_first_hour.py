"""tools/gpu_first_hour.sh --smoke-test: the parts of the first ten minutes really run, with small sizes, on a CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rankfold.benchmarking.first_hour.figures import record_of_tests
from rankfold.benchmarking.first_hour.parts import PARTS, ROOT

EARLY = [part.name for part in PARTS if part.early]


def _environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), **more}


def _script(out: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "tools/gpu_first_hour.sh", str(out), *words]
    return subprocess.run(command, cwd=ROOT, env=_environment(**more), capture_output=True, text=True)


def _outcomes(out: Path) -> dict[str, dict[str, Any]]:
    found = json.loads((out / "smoke-test" / "summary.json").read_text(encoding="utf-8"))
    return {one["name"]: one for one in found}


def test_a_part_runs_in_small(tmp_path: Path) -> None:
    done = _script(tmp_path, "machine-speed", "--smoke-test")
    assert done.returncode == 0, done.stderr
    outcome = _outcomes(tmp_path)["machine-speed"]
    assert outcome["status"] == "passed" and "GB/s" in outcome["figures"] and "1 machine-speed" in done.stdout
    files = {path.suffix for path in (tmp_path / "smoke-test").glob("01-machine-speed.*")}
    assert files == {".json", ".log", ".md", ".outcome"}
    assert [path.name for path in tmp_path.iterdir()] == ["smoke-test"], "a later call takes it for a GPU's"


BLOCKER = "import sys\nsys.modules |= dict.fromkeys(['jsonargparse', 'docstring_parser'])\n"


def test_what_is_missing_is_said_first(tmp_path: Path) -> None:
    """Without two packages that few images have, with how they get there; the other parts run."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKER, encoding="utf-8")
    done = _script(tmp_path, "machine-speed", "rollouts", "--smoke-test", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    first, install, carry, *rest = done.stderr.splitlines()
    assert "will be left out: rollouts (needs jsonargparse and docstring_parser, not installed for" in first
    assert install.endswith(f"-m pip install -c {ROOT}/constraints.txt docstring-parser jsonargparse")
    assert "pip download --no-deps -d WHEELS -c constraints.txt docstring-parser jsonargparse on another" in carry
    assert any("passed after" in line for line in rest)
    statuses = {name: one["status"] for name, one in _outcomes(tmp_path).items()}
    assert statuses == {"machine-speed": "passed", "rollouts": "left out"}


def _start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Starts the first hour with two parts more, in a process group of its own that takes interrupts, as a shell's
    background jobs do not."""
    command = [sys.executable, "-m", "tests.support.first_hour_parts", str(folder), str(folder / "out"), *words]
    return subprocess.Popen(
        command, cwd=ROOT, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def _wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def _assert_tests_reported(folder: Path, status: str) -> None:
    """What failed before the end is known, and the test that waited has ended."""
    outcome = _outcomes(folder / "out")["endless"]
    assert (outcome["status"], outcome["figures"]) == (status, "0 passed, 1 failed, 0 skipped")
    (xml,) = (folder / "out").glob("smoke-test/*-endless.xml")
    assert "test_endless::test_fails" in record_of_tests(xml.read_text(encoding="utf-8"))["failed"]
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(folder / "test_endless.py") not in running


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupted_part_is_ended_and_counted(tmp_path: Path, number: signal.Signals) -> None:
    process = _start(tmp_path, "broken", "endless", "--smoke-test")
    _wait_for(tmp_path / "waits", process)
    os.killpg(process.pid, number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and said.splitlines()[-1] == "interrupted" and "Traceback" not in said
    _assert_tests_reported(tmp_path, "interrupted")
    broken = _outcomes(tmp_path / "out")["broken"]
    assert broken["status"] == "failed" and broken["figures"].startswith("error: --hidden 63 over --heads 8")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_first_ten_minutes(tmp_path: Path) -> None:
    """All early parts, one that fails and one that is out of time; ended in the middle, and gone on with."""
    smoke_test = tmp_path / "out" / "smoke-test"
    process = _start(tmp_path, "--smoke-test", "--ten-minutes")
    _wait_for(smoke_test / "04-step.log", process)
    time.sleep(2)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    passed = dict.fromkeys(EARLY[:3], "passed")
    assert {name: one["status"] for name, one in _outcomes(tmp_path / "out").items()} == {
        **passed, "step": "interrupted",
    }  # fmt: skip
    process = _start(tmp_path, "--smoke-test", "--seconds", "1500")
    printed, said = process.communicate()
    statuses = {name: one["status"] for name, one in _outcomes(tmp_path / "out").items()}
    logs = {path.name: path.read_text()[-2000:] for path in smoke_test.glob("*.log")}
    assert statuses == {**dict.fromkeys(EARLY, "passed"), "broken": "failed", "endless": "out of time"}, logs
    assert process.returncode == 1 and said.count("passed before") == 3
    _assert_tests_reported(tmp_path, "out of time")
    assert "did not begin" not in printed
    for name in EARLY:
        (record,) = smoke_test.glob(f"*-{name}.json")
        assert json.loads(record.read_text(encoding="utf-8")) and name in printed
    assert "tokens/s" in _outcomes(tmp_path / "out")["rollouts"]["figures"]
    assert not list(smoke_test.rglob("*.safetensors"))
