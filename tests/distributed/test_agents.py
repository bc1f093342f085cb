"""Completions that agents drive under every layout are those of one process, and a run resumes inside their buffer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.agent_runs import agent_settings
from tests.support.rollout_runs import final_state, records, run_here, stepped
from tests.support.spawning import spawn
from tests.support.sweeps import sampled

pytestmark = pytest.mark.distributed

LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "tensor": (2, {"parallel.tensor": 2}),
    "pipeline": (2, {"parallel.pipeline": 2, "parallel.virtual": 1}),
    "interleaved": (2, {"parallel.pipeline": 2, "parallel.virtual": 2}),
    "data": (2, {}),
    "context": (2, {"parallel.context": 2}),
    "parameters": (2, {"parallel.shard": "parameters"}),
    "tensor, pipeline": (4, {"parallel.tensor": 2, "parallel.pipeline": 2, "parallel.virtual": 1}),
}
QUICK = ("data",)
SAME = (
    "completions", "reward", "rewards/environment/mean", "completions/mean_length", "turns/mean", "turns/branches",
    "turns/left_out", "agent/opened", "tools/call_frequency", "uniform_groups",
)  # fmt: skip
STEPS = 2


def _settings(folder: Path, **changes: object) -> dict[str, object]:
    """Uneven work: seven prompts a step over two copies, and slots for fewer rows than each has."""
    uneven = {"train__global_batch_size": 28, "train__micro_batch_size": 1, "rollout__slots": 6, "optim__lr": 0.01}
    return agent_settings(folder, **({"train__steps": STEPS, **uneven} | changes))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    found = stepped(_settings(tmp_path_factory.mktemp("alone")), STEPS)
    assert all(step["tools/call_frequency"] > 0.3 and step["turns/mean"] > 1.1 for step in found)
    return found


@pytest.mark.parametrize("layout", sampled(LAYOUTS, QUICK))
def test_completions_and_rewards_are_those_of_one_process(
    layout: str, alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Fails where a rank continues another's conversation, and hangs where ranks disagree about who waits."""
    world, changes = LAYOUTS[layout]
    ranks = spawn(stepped, world=world, args=({**_settings(tmp_path), **changes}, STEPS), timeout=180)
    for steps in ranks:
        for found, expected in zip(steps, alone, strict=True):
            assert {name: found[name] for name in SAME} == {name: expected[name] for name in SAME}
            assert found["loss"] == pytest.approx(expected["loss"], abs=1e-4)
            assert found["sampler_difference_max"] < 4e-6


@pytest.mark.slow
def test_a_run_resumes_inside_a_buffer(tmp_path: Path) -> None:
    """With the bits, and the metrics, of a run that was not stopped."""
    settings = [_settings(tmp_path / name, rollout__steps_per_generation=2, train__steps=4) for name in "ab"]
    run_here(settings[0])
    run_here({**settings[1], "train.steps": 3})
    run_here({**settings[1], "checkpoint.resume": "auto"})
    whole, resumed = (final_state(tmp_path / name / "run", 4) for name in "ab")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    for name in ("loss", "agent/opened", "turns/branches"):
        of_runs = [[record[name] for record in records(tmp_path / one / "run")] for one in "ab"]
        assert of_runs[0] == of_runs[1], name
