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
STEPS = {"rankfold_ones": 8, "rankfold_reverse": 24}
needs_verifiers = pytest.mark.skipif(
    PYTHON is None, reason="verifiers 0.4 is not installed, and RANKFOLD_VERIFIERS names no Python that has it"
)


def _train(
    folder: Path, name: str, *, agent: str | None = None, steps: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Trains on an environment, or with another agent on two prompts."""
    folder.mkdir()
    settings = tool_settings(
        folder, train__steps=steps or STEPS[name], train__global_batch_size=32, rollout__num_generations=8,
        rollout__show=0, rollout__max_completion_length=24 if name == "rankfold_ones" else 8, optim__lr=0.05,
        rollout__environment_workers=3, lora__rank=8, lora__alpha=32,
    )  # fmt: skip
    write_environments(folder)
    path = folder / "model" / "config.json"  # numbers of the usual size would hide what little is learned in few steps
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"initializer_range": 0.15}), "utf-8")
    del settings["rollout.environment"]
    if agent is None:
        del settings["data.train"]
        agent = f"verifiers:{folder}/{name}.toml"
    else:
        settings |= {"train.global_batch_size": 4, "rollout.num_generations": 2, "data.seq_length": 120}
        settings["rollout.max_completion_length"] = 100
    settings["rollout.agent"] = agent
    command = [str(PYTHON), "-m", "rankfold", "train"]
    given = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    paths = os.pathsep.join((str(ROOT), str(folder)))
    return subprocess.run(
        [*command, *given], capture_output=True, text=True, timeout=1200, env={**os.environ, "PYTHONPATH": paths}
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs_verifiers
@pytest.mark.parametrize("name", STEPS)
def test_rewards_rise(tmp_path: Path, name: str) -> None:
    """The environments' own code asks, and scores; the log-probabilities of what it was told are the trainer's."""
    found = _train(tmp_path / "a", name)
    assert found.returncode == 0, found.stderr
    steps = records(tmp_path / "a" / "run")
    first, last = ([step["reward"] for step in some] for some in (steps[:4], steps[-4:]))
    assert sum(last) / 4 > 1.5 * sum(first) / 4, (first, last)
    # above 4e-6 once: weights, and the rounding of logits with them, grow at this learning rate
    assert max(step["sampler_difference_max"] for step in steps) < 8e-6
    assert all(step["turns/branches"] == 1 and step["turns/left_out"] == 0 for step in steps)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs_verifiers
def test_two_runs_have_the_same_bits(tmp_path: Path) -> None:
    runs = []
    for name in "ab":
        found = _train(tmp_path / name, "rankfold_ones", steps=2)
        assert found.returncode == 0, found.stderr
        runs.append([(step["loss"], step["reward"]) for step in records(tmp_path / name / "run")])
    assert runs[0] == runs[1]


VF_EVAL = """
import subprocess
import sys


def agent(number, base_url, model):
    kind = ("eval", "train")[number % 2]
    more = ["--client.renderer-model-name", "{model}"] if kind == "train" else []
    given = [
        "rankfold_ones", "-n", "2", "--no-push", "--no-rich", "-m", model, "--client.type", kind,
        "--client.base-url", base_url, "--client.api-key-var", "OPENAI_API_KEY",
        "--env.agent.runtime.type", "subprocess", "-o", "{out}", *more,
    ]
    program = "from verifiers.v1.cli.eval.main import main; main()"
    done = subprocess.run([sys.executable, "-c", program, *given], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.count("turns=2 stop=agent_completed") == 2, done.stderr
    return 1.0
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs_verifiers
def test_vf_eval_with_both_of_its_clients(tmp_path: Path) -> None:
    """Its client for chats, and the one that renders tokens itself and sends them to vLLM's route: a task has two
    turns, of which the second continues the tokens of the first."""
    folder = tmp_path / "a"
    (tmp_path / "agent.py").write_text(
        VF_EVAL.replace("{model}", str(folder / "model")).replace("{out}", f"{folder}/o")
    )
    found = _train(folder, "rankfold_ones", agent=f"{tmp_path}/agent.py:agent", steps=1)
    assert found.returncode == 0, found.stderr
    (step,) = records(folder / "run")
    assert step["reward"] == 1 and step["unscored"] == 0
    assert step["turns/branches"] == 2 and step["turns/mean"] == 2


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
