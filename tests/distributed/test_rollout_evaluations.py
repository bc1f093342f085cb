"""Evaluations of runs on rollouts in every layout are those of one process: the same completions by trained factors."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from engine.rollouts.source import RolloutSource
from tests.support.rollout_runs import prepared, rollout_settings
from tests.support.spawning import spawn
from tests.support.sweeps import sampled

pytestmark = pytest.mark.distributed

LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "tensor": (2, {"parallel.tensor": 2}),
    "pipeline": (2, {"parallel.pipeline": 2, "parallel.virtual": 2}),
    "data": (2, {}),
    "context": (2, {"parallel.context": 2}),
    "parameters": (2, {"parallel.shard": "parameters"}),
    "tensor, pipeline": (4, {"parallel.tensor": 2, "parallel.pipeline": 2, "parallel.virtual": 1}),
    "four copies": (4, {"parallel.shard": "optimizer"}),
}
QUICK = ("tensor",)


def _settings(folder: Path, **changes: object) -> dict[str, object]:
    """Three held-out prompts, fewer than there may be copies of the model."""
    return rollout_settings(
        folder, data__validation_split=0.08, rollout__eval_generations=3, rollout__eval_top_p=0.9, optim__lr=0.01,
        rollout__pass_reward=0.15, **changes,
    )  # fmt: skip


def evaluated(settings: dict[str, object]) -> list[dict[str, float]]:
    """The figures of evaluations after one step and after two."""
    found = []
    with ExitStack() as opened:
        run = prepared(settings, opened)
        assert isinstance(run.source, RolloutSource) and run.source.validation is not None
        for number, rows in enumerate(run.source.stream(0, 0, 2)):
            run.training.step(rows.batches, rows.targets, run.step_plan.rate(number))
            found.append(dict(run.source.validation.run(number + 1, lambda: None).figures))
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    return evaluated(_settings(tmp_path_factory.mktemp("alone")))


@pytest.mark.parametrize("layout", sampled(LAYOUTS, QUICK))
def test_figures_are_those_of_one_process(layout: str, alone: list[dict[str, float]], tmp_path: Path) -> None:
    assert alone[0] != alone[1] and 0 < alone[1]["eval/pass@2"] < 1
    world, changes = LAYOUTS[layout]
    for found in spawn(evaluated, world=world, args=({**_settings(tmp_path), **changes},), timeout=120):
        assert found == alone
