"""A server's completions in every layout: rank 0 asks for all, and writes the adapters of all ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.errors import UserError
from tests.completion_stand_in import StandIn
from tests.rollout_runs import run_here, stepped
from tests.served_runs import served_settings
from tests.spawning import spawn
from tests.sweeps import sampled

pytestmark = pytest.mark.distributed

LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "tensor": (2, {"parallel.tensor": 2}),
    "pipeline": (2, {"parallel.pipeline": 2, "parallel.virtual": 1}),
    "data": (2, {}),
    "context": (2, {"parallel.context": 2}),
    "parameters": (2, {"parallel.shard": "parameters"}),
    "tensor, pipeline": (4, {"parallel.tensor": 2, "parallel.pipeline": 2, "parallel.virtual": 1}),
    "tensor, parameters": (4, {"parallel.tensor": 2, "parallel.shard": "parameters"}),
}
QUICK = ("tensor", "pipeline", "parameters")
STEPS = 3
BOUND = 2e-6
"""Of a log-probability, as transformers with PEFT and the trainer see it, in fp32."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    served_settings(folder)
    with StandIn(folder / "model") as one:
        yield one


def _settings(folder: Path, server: StandIn) -> dict[str, object]:
    given = served_settings(
        folder, server.url, train__steps=STEPS, train__global_batch_size=8, train__micro_batch_size=1,
        rollout__num_generations=2, optim__lr=0.01,
    )  # fmt: skip
    return given | {"model.path": server.model}


@pytest.fixture(scope="module")
def alone(server: StandIn, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return stepped(_settings(tmp_path_factory.mktemp("alone"), server), STEPS)


@pytest.mark.parametrize("layout", sampled(LAYOUTS, QUICK))
def test_completions_are_those_of_one_process(
    layout: str, server: StandIn, alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Each is asked for once, whatever the number of ranks, and the trainer agrees with what the server made of the
    adapter that was put together from all ranks. With a rank's part left out, log-probabilities differ by 0.02."""
    world, changes = LAYOUTS[layout]
    before = len(server.asked)
    ranks = spawn(stepped, world=world, args=({**_settings(tmp_path, server), **changes}, STEPS), timeout=120)
    assert len(server.asked) - before == 8 * STEPS
    for steps in ranks:
        for found, expected in zip(steps, alone, strict=True):
            assert found["completions"] == expected["completions"]
            assert found["loss"] == pytest.approx(expected["loss"], abs=1e-4)
            assert found["sampler_difference_max"] < BOUND


def _refused(settings: dict[str, object]) -> str:
    with pytest.raises(UserError) as refusal:
        run_here(settings)
    return str(refusal.value)


def test_all_ranks_hear_why(server: StandIn, tmp_path: Path) -> None:
    """One that waited for a completion that will not come would hang until the collective times out."""
    try:
        server.mangle = lambda answer: answer["choices"][0].pop("token_ids")
        first, second = spawn(_refused, world=2, args=(_settings(tmp_path, server),), timeout=60)
        assert first == second and "the answer has no token_ids" in first
    finally:
        server.mangle = None


@pytest.mark.slow
def test_inside_a_buffer_two_ranks_do_not_ask_again(server: StandIn, tmp_path: Path) -> None:
    settings = _settings(tmp_path, server) | {
        "train.steps": 2, "rollout.steps_per_generation": 2, "checkpoint.every": 1, "checkpoint.keep": 0,
    }  # fmt: skip
    before = len(server.asked)
    spawn(run_here, world=2, args=(settings,), timeout=120)
    assert len(server.asked) - before == 16
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000002")
    spawn(run_here, world=2, args=(settings,), timeout=120)
    assert len(server.asked) - before == 16
