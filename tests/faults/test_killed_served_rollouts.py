"""A run whose completions a server samples one batch ahead is killed at any moment, and ends as if it had not been.

The server lives on, and has what the killed run gave it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from engine.checkpoint.run import commit
from engine.rollouts.servers.http import HttpServer
from engine.training.step import TrainStep
from tests.faults.test_killed_rollouts import killing
from tests.support.completion_stand_in import StandIn
from tests.support.rollout_runs import final_state, records, run_here
from tests.support.served_runs import served_settings
from tests.support.spawning import RankFailure, spawn
from tests.support.sweeps import sampled

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="kills by process id"),
]

STEPS = 6
MOMENTS = {
    "first load": ("call", 8),
    "first rollout": ("call", 11),
    "rollout beside training": ("call", 23),
    "later load": ("call", 25),
    "later farewell": ("call", 26),
    "first step": ("step", 1),
    "inside a buffer": ("step", 2),
    "between two buffers": ("step", 3),
    "save inside a buffer": ("save", 1),
    "save between two buffers": ("save", 2),
    "last save": ("save", STEPS),
}
"""The first six calls look at the server, two give up and load an adapter, sixteen sample two batches."""
QUICK = ("later load",)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    folder = tmp_path_factory.mktemp("model")
    served_settings(folder)
    with StandIn(folder / "model") as one:
        yield one


def _settings(folder: Path, server: StandIn) -> dict[str, object]:
    """Two steps a buffer; a checkpoint after every step."""
    given = served_settings(
        folder, server.url, train__steps=STEPS, train__global_batch_size=4, rollout__num_generations=2,
        rollout__steps_per_generation=2, rollout__overlap="true", checkpoint__every=1, lora__dropout=0.1,
        rollout__slots=1,
    )  # fmt: skip
    return given | {"model.path": server.model}


def _killed(settings: dict[str, object], what: str, number: int) -> None:
    places = {"call": (HttpServer, "call"), "step": (TrainStep, "__call__"), "save": (commit, "write_manifest")}
    owner, name = places[what]
    with mock.patch.object(owner, name, killing(getattr(owner, name), number)):
        run_here(settings)


@pytest.fixture(scope="module")
def whole(server: StandIn, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run_here(_settings(folder, server))
    return folder / "run"


@pytest.mark.parametrize("moment", sampled(MOMENTS, QUICK))
def test_a_killed_run_ends_with_the_same_bits(moment: str, server: StandIn, whole: Path, tmp_path: Path) -> None:
    """Where what was under way is sampled by newer weights, or by another seed, masters differ. Nothing of the killed
    run stays, on the server or on the disk."""
    what, number = MOMENTS[moment]
    settings = _settings(tmp_path, server)
    with pytest.raises(RankFailure, match="died with exit code -9"):
        spawn(_killed, world=1, args=(settings, what, number), timeout=60)
    spawn(run_here, world=1, args=(settings,), timeout=60)
    expected, found = final_state(whole, STEPS), final_state(tmp_path / "run", STEPS)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    known = [(one["reward"], one["off_policy_steps"]) for one in records(whole)]
    assert [(one["reward"], one["off_policy_steps"]) for one in records(tmp_path / "run")] == known
    assert server.adapters == {} and not (tmp_path / "run" / "served_adapters").exists()
