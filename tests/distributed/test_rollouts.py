"""Rollouts under every layout are those of one process: the same completions and rewards, and the trainer agrees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.small_runs.routed_place import put_experts
from tests.support.rollout_runs import rollout_settings, stepped
from tests.support.spawning import spawn
from tests.support.sweeps import sampled
from tests.wrong_inputs.workplace import make_place

pytestmark = pytest.mark.distributed

LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "tensor and sequence": (2, {"parallel.tensor": 2}),
    "tensor": (2, {"parallel.tensor": 2, "parallel.sequence": "false"}),
    "pipeline": (2, {"parallel.pipeline": 2, "parallel.virtual": 1}),
    "interleaved": (2, {"parallel.pipeline": 2, "parallel.virtual": 2}),
    "v": (2, {"parallel.pipeline": 2, "parallel.virtual": 2, "parallel.schedule": "zb_v"}),
    "data": (2, {}),
    "data, unpacked": (2, {"data.packing": "false"}),
    "context": (2, {"parallel.context": 2}),
    "parameters": (2, {"parallel.shard": "parameters"}),
    "tensor, one slot, unpacked": (2, {"parallel.tensor": 2, "rollout.slots": 1, "data.packing": "false"}),
    "pipeline, one slot, unpacked": (2, {"parallel.pipeline": 2, "rollout.slots": 1, "data.packing": "false"}),
    "tensor, pipeline": (4, {"parallel.tensor": 2, "parallel.pipeline": 2, "parallel.virtual": 1}),
    "tensor, parameters": (4, {"parallel.tensor": 2, "parallel.shard": "parameters"}),
}
QUICK = ("tensor and sequence", "interleaved")
SAME = (
    "completions", "reward", "rewards/ones/mean", "rewards/long/std", "completions/mean_length",
    "completions/max_terminated_length", "completions/clipped_ratio", "uniform_groups",
)  # fmt: skip
BOUND = 4e-6
"""Largest error of a log-probability, as the sampler and the trainer see it; see tests/rollouts/test_sampler.py."""
STEPS = 3


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return stepped(_settings(tmp_path_factory.mktemp("alone")), STEPS)


def _settings(folder: Path) -> dict[str, object]:
    """Uneven work: seven prompts a step over two copies, and slots for fewer rows than each has."""
    return rollout_settings(
        folder, train__steps=STEPS, train__global_batch_size=28, train__micro_batch_size=1, rollout__slots=6,
        optim__lr=0.01,
    )  # fmt: skip


@pytest.mark.parametrize("layout", sampled(LAYOUTS, QUICK))
def test_completions_and_rewards_are_those_of_one_process(
    layout: str, alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Fails where data ranks answer each other's prompts, and hangs where a pass has rows that do not divide."""
    world, changes = LAYOUTS[layout]
    ranks = spawn(stepped, world=world, args=({**_settings(tmp_path), **changes}, STEPS), timeout=120)
    for steps in ranks:
        for found, expected in zip(steps, alone, strict=True):
            assert {name: found[name] for name in SAME} == {name: expected[name] for name in SAME}
            assert found["loss"] == pytest.approx(expected["loss"], abs=1e-4)
            assert found["sampler_difference_max"] < BOUND


@pytest.mark.parametrize("level", sampled(("optimizer", "gradients"), ("optimizer",)))
def test_ranks_without_completions_gather_the_weights_of_the_last_step(level: str, tmp_path: Path) -> None:
    """Two completions for four ranks. Two of them run no forward, in which the others would wait for their parts of the
    weights: where sampling does not finish that first, the second step does not come to an end."""
    changes = {"train.global_batch_size": 2, "rollout.num_generations": 2, "train.micro_batch_size": 1}
    settings = _settings(tmp_path) | changes
    expected = stepped(settings, 2)
    # several buckets, whose weights arrive layer by layer
    layout = {
        "parallel.context": 4,
        "parallel.shard": level,
        "parallel.bucket_mb": 0.004,
        "train.collective_timeout": 20,
    }
    for steps in spawn(stepped, world=4, args=(settings | layout, 2), timeout=90):
        assert [one["completions"] for one in steps] == [one["completions"] for one in expected]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"parallel.expert": 2}, {"parallel.expert": 2, "parallel.tensor": 2}])
def test_experts_on_other_ranks(changes: dict[str, object], tmp_path: Path) -> None:
    """Copies that send each other tokens run as many passes, whatever is left of their own prompts."""
    found = []
    for name, world, more in (("one", 1, {}), ("two", 2, changes)):
        place = make_place(tmp_path / name)
        put_experts(place, 4, sees_signs=False)
        lines = [json.dumps({"prompt": text}) + "\n" for text in ("abab", "ba", "abba c", "cab bac", "aa", "bb cc a")]
        place.train.write_text("".join(lines), encoding="utf-8")
        settings = place.options | {
            "objective.name": "grpo", "rollout.rewards": "['regex:a']", "rollout.num_generations": 2,
            "rollout.max_completion_length": 5, "rollout.slots": 3, "train.global_batch_size": 6,
            "train.micro_batch_size": 1, "data.seq_length": 24, "train.steps": STEPS, "optim.lr": 0.02,
            "checkpoint.dir": tmp_path / name / "run", "lora.dropout": 0.0, **more,
        }  # fmt: skip
        kept = {option: value for option, value in settings.items() if value is not None}
        found.append(spawn(stepped, world=world, args=(kept, STEPS), timeout=120)[0])
    assert [one["completions"] for one in found[1]] == [one["completions"] for one in found[0]]
    assert max(one["sampler_difference_max"] for one in found[1]) < BOUND
