"""Environments of the package verifiers drive conversations with their own code; with it in a Python of its own, which
RANKFOLD_VERIFIERS names, or in this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from engine.rollouts.agents.worker import checked, tasks_of
from tests.support.commands import options
from tests.support.rollout_runs import records
from tests.support.tool_runs import tool_settings
from tests.support.verifiers_environments import write_environments

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("RANKFOLD_VERIFIERS") or (sys.executable if find_spec("verifiers") is not None else None)
STEPS = {"rankfold_ones": 16, "rankfold_reverse": 40}
needs_verifiers = pytest.mark.skipif(
    PYTHON is None, reason="verifiers 0.4 is not installed, and RANKFOLD_VERIFIERS names no Python that has it"
)


def _train(folder: Path, name: str, **changes: object) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    settings = tool_settings(
        folder, train__steps=STEPS[name], train__global_batch_size=32, rollout__num_generations=8, rollout__show=0,
        rollout__max_completion_length=24 if name == "rankfold_ones" else 8, rollout__environment_workers=3, **changes,
    )  # fmt: skip
    write_environments(folder)
    del settings["rollout.environment"], settings["data.train"]
    settings["rollout.agent"] = f"verifiers:{folder}/{name}.toml"
    command = [str(PYTHON), "-m", "rankfold", "train"]
    given = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    paths = os.pathsep.join((str(ROOT), str(folder)))
    return subprocess.run(
        [*command, *given], capture_output=True, text=True, timeout=1200, env={**os.environ, "PYTHONPATH": paths}
    )


@pytest.mark.slow
@needs_verifiers
@pytest.mark.parametrize("name", STEPS)
def test_rewards_rise(tmp_path: Path, name: str) -> None:
    """The environments' own code asks, and scores; the log-probabilities of what it was told are the trainer's."""
    found = _train(tmp_path / "a", name)
    assert found.returncode == 0, found.stderr
    steps = records(tmp_path / "a" / "run")
    first, last = ([step["reward"] for step in some] for some in (steps[:4], steps[-4:]))
    assert sum(last) / 4 > 1.5 * sum(first) / 4, (first, last)
    assert all(step["sampler_difference_max"] < 4e-6 for step in steps)
    assert all(step["turns/branches"] == 1 and step["turns/left_out"] == 0 for step in steps)


@pytest.mark.slow
@needs_verifiers
def test_two_runs_have_the_same_bits(tmp_path: Path) -> None:
    runs = []
    for name in "ab":
        found = _train(tmp_path / name, "rankfold_ones")
        assert found.returncode == 0, found.stderr
        runs.append([(step["loss"], step["reward"]) for step in records(tmp_path / name / "run")])
    assert runs[0] == runs[1]


@pytest.mark.skipif(find_spec("verifiers") is not None, reason="verifiers is installed here")
def test_a_missing_package_is_said(tmp_path: Path) -> None:
    settings = tool_settings(tmp_path)
    del settings["rollout.environment"], settings["data.train"]
    settings["rollout.agent"] = "verifiers:reverse-text"
    found = subprocess.run(
        [sys.executable, "-m", "rankfold", "train", *(options(settings))],
        capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert found.returncode == 2 and "Traceback" not in found.stderr
    assert "rollout.agent: verifiers:reverse-text cannot be loaded" in found.stderr
    assert "needs the package verifiers 0.4" in found.stderr and "pip install verifiers" in found.stderr


def test_replies_of_environments() -> None:
    class Broken:
        def tasks(self) -> list[dict[str, object]]:
            raise RuntimeError("no tasks")

    assert tasks_of(Broken()) == {"problem": "RuntimeError: no tasks"}
    assert checked({"reward": 1, "metrics": {"a": 2}}) == {"reward": 1.0, "metrics": {"a": 2.0}}
    assert "problem" in checked({"reward": "x"}) and "problem" in checked({"reward": 1, "metrics": {"a\n": 1}})
    assert json.dumps(checked(None)) == '{"reward": null, "metrics": {}}'
