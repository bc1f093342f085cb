"""Teachers under every layout give the log-probabilities that they give on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.rollout_runs import stepped
from tests.support.spawning import spawn
from tests.support.sweeps import sampled
from tests.support.teachers import distilled_settings

pytestmark = pytest.mark.distributed

TEACHERS = ("other", "adapter", "base")
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "tensor and sequence": (2, {"parallel.tensor": 2}),
    "tensor": (2, {"parallel.tensor": 2, "parallel.sequence": "false"}),
    "pipeline": (2, {"parallel.pipeline": 2, "parallel.virtual": 1}),
    "interleaved": (2, {"parallel.pipeline": 2, "parallel.virtual": 2}),
    "v": (2, {"parallel.pipeline": 2, "parallel.virtual": 2, "parallel.schedule": "zb_v"}),
    "data": (2, {"data.packing": "false"}),
    "context": (2, {"parallel.context": 2}),
    "parameters": (2, {"parallel.shard": "parameters"}),
    "tensor, pipeline, recomputed": (
        4,
        {"parallel.tensor": 2, "parallel.pipeline": 2, "parallel.virtual": 1, "memory.recompute": "full"},
    ),
    "tensor, parameters": (4, {"parallel.tensor": 2, "parallel.shard": "parameters"}),
}
QUICK = ("interleaved", "tensor, parameters")
STEPS = 2


def _settings(folder: Path) -> dict[str, object]:
    return distilled_settings(
        folder, TEACHERS, train__steps=STEPS, train__global_batch_size=12, train__micro_batch_size=1, optim__lr=0.01
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return stepped(_settings(tmp_path_factory.mktemp("alone")), STEPS)


@pytest.mark.parametrize("layout", sampled(LAYOUTS, QUICK))
def test_divergences_and_losses_are_those_of_one_process(
    layout: str, alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    """The second step's also show that its gradients were: they are of weights that moved."""
    world, changes = LAYOUTS[layout]
    for steps in spawn(stepped, world=world, args=({**_settings(tmp_path), **changes}, STEPS), timeout=120):
        for found, expected in zip(steps, alone, strict=True):
            assert found["completions"] == expected["completions"]
            for teacher in TEACHERS:
                name = f"teachers/{teacher}/kl"
                assert found[name] == pytest.approx(expected[name], abs=3e-6)
            assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
