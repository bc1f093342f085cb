"""A server's completions in every layout: rank 0 asks for all, and writes the adapters of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from engine.distributed.collectives import broadcast_object
from engine.errors import UserError
from engine.rollouts.source import RolloutSource
from tests.support.completion_stand_in import StandIn
from tests.support.rollout_runs import prepared, stepped
from tests.support.served_runs import served_settings
from tests.support.spawning import spawn
from tests.support.sweeps import sampled

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
QUICK = ("parameters",)
STEPS = 3
BOUND = 5e-6
"""Largest error of a log-probability, as transformers with PEFT and the trainer see it: some units of fp32's last place
at the size of logits. A wrong adapter differs by a thousand times as much."""


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
    adapter that was put together from all ranks. With rank 1's factors B left out, later completions are others."""
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
        stepped(settings, 1)
    return str(refusal.value)


def test_all_ranks_hear_why(server: StandIn, tmp_path: Path) -> None:
    """One that waited for a completion that will not come would hang until the collective times out."""
    try:
        server.mangle = lambda answer: answer["choices"][0].pop("token_ids")
        first, second = spawn(_refused, world=2, args=(_settings(tmp_path, server),), timeout=60)
        assert first == second and "the answer has no token_ids" in first
    finally:
        server.mangle = None


@dataclass
class _Kept:
    """A checkpoint, as far as a source reads it."""

    state: dict[str, Any]
    files: Mapping[str, bytes]
    folder: Path = Path("kept")

    def beside(self, name: str) -> bytes:
        return self.files[name]


def _restored(settings: dict[str, object]) -> tuple[list[Any], list[Any], int]:
    """The completions and log-probabilities that two steps are trained on, the second of them after a restart; and how
    many files a checkpoint between them has."""
    found = []
    with ExitStack() as opened:
        run = prepared(settings, opened)
        source = run.source
        assert isinstance(source, RolloutSource)
        with closing(source.stream(0, 0, 2)) as steps:
            rows = next(steps)
            run.training.step(rows.batches, rows.targets, 0.01)
        found.append(_buffer(source))
        state = source.state(rows.samples)
        # rank 0 writes the checkpoint, and all read it
        values, files = cast(
            tuple[dict[str, Any], Mapping[str, bytes]], broadcast_object((dict(state.values), dict(state.files)))
        )
        kept = {**values, "data": run.data.train.fingerprint()}
        source._open = None
        source.restore(_Kept(kept, files), rows.samples)  # type: ignore[arg-type]
        with closing(source.stream(1, rows.samples, 1)) as steps:
            next(steps)
        found.append(_buffer(source))
    return found[0], found[1], len(files)


def _buffer(source: RolloutSource) -> list[Any]:
    buffer = source.buffer
    assert buffer is not None and buffer.old_logps is not None
    own = [(one.tokens.tolist(), one.logps.tolist(), one.truncated) for one in buffer.completions]
    return [*own, [one.tolist() for one in buffer.old_logps]]


def test_inside_a_buffer_nobody_asks_again(server: StandIn, tmp_path: Path) -> None:
    """Two steps a buffer, on two ranks: both go on with the completions of the checkpoint, bit by bit."""
    settings = _settings(tmp_path, server) | {"rollout.steps_per_generation": 2}
    before = len(server.asked)
    for first, second, files in spawn(_restored, world=2, args=(settings,), timeout=120):
        assert first == second and files == 1
    asked = [one.body["model"] for one in server.asked[before:]]  # a call of the test before may come late
    assert asked.count(asked[-1]) == 16
