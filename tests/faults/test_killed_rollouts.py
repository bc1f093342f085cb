"""A run that samples what it trains on is killed at any moment, and ends as if nothing had happened."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from engine.checkpoint.run import commit
from engine.inference.model_part import InferenceStage
from engine.training.step import TrainStep
from tests.support.rollout_runs import final_state, records, rollout_settings, run_here
from tests.support.spawning import RankFailure, spawn
from tests.support.sweeps import sampled

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="kills by process id"),
]

STEPS = 6
MOMENTS = {
    "first rollout": ("decode", 3),
    "later rollout": ("decode", 60),
    "first reward": ("reward", 1),
    "later reward": ("reward", 2),
    "first step": ("step", 1),
    "inside a buffer": ("step", 4),
    "between two buffers": ("step", 5),
    "first save": ("save", 1),
    "save inside a buffer": ("save", 3),
    "last save": ("save", 6),
}
QUICK = ("save inside a buffer",)
REWARD = """
import os, signal
def ones(completions, **columns):
    if os.path.exists({count!r}):
        number = int(open({count!r}).read()) - 1
        open({count!r}, "w").write(str(number))
        if number == 0:
            supervisor = open("/proc/%d/stat" % os.getppid()).read()
            os.kill(int(supervisor.rpartition(")")[2].split()[1]), signal.SIGKILL)
    return [completion.count("1") / 6 for completion in completions]
"""


def _settings(folder: Path) -> dict[str, object]:
    """Two steps with prompts of their own a buffer, twice each; a checkpoint after every step."""
    settings = rollout_settings(
        folder, train__steps=STEPS, rollout__steps_per_generation=2, objective__num_iterations=2, checkpoint__every=1,
        lora__dropout=0.1,
    )  # fmt: skip
    (folder / "rewards.py").write_text(REWARD.format(count=str(folder / "count")), encoding="utf-8")
    return settings | {"rollout.rewards": f"{folder}/rewards.py:ones", "rollout.reward_weights": "[]"}


def killing(act: Callable[..., Any], number: int) -> Callable[..., Any]:
    """`act`, which kills the process when it is called for the `number`-th time."""
    left = [number]

    def counted(*arguments: Any, **more: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return act(*arguments, **more)

    return counted


def kill(settings: dict[str, object], what: str, number: int) -> None:
    places = {"decode": (InferenceStage, "decode"), "step": (TrainStep, "__call__"), "save": (commit, "write_manifest")}
    if what == "reward":
        run_here(settings)
        return
    owner, name = places[what]
    with mock.patch.object(owner, name, killing(getattr(owner, name), number)):
        run_here(settings)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run_here(_settings(folder))
    return folder / "run"


@pytest.mark.parametrize("moment", sampled(MOMENTS, QUICK))
def test_a_killed_run_ends_with_the_same_bits(moment: str, whole: Path, tmp_path: Path) -> None:
    """Where the buffer is not in the checkpoint, or is sampled with another generation's number, masters differ."""
    what, number = MOMENTS[moment]
    settings = _settings(tmp_path)
    if what == "reward":
        (tmp_path / "count").write_text(str(number), encoding="utf-8")
    with pytest.raises(RankFailure, match="died with exit code -9"):
        spawn(kill, world=1, args=(settings, what, number), timeout=60)
    if what == "reward":
        (tmp_path / "count").unlink()
    spawn(run_here, world=1, args=(settings,), timeout=60)
    expected, found = final_state(whole, STEPS), final_state(tmp_path / "run", STEPS)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert [one["reward"] for one in records(tmp_path / "run")] == [one["reward"] for one in records(whole)]
