"""Conversations whose rows stay in the cache, under every layout: those of one process, and what they compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.kept_turns import Talked, family_settings, talked
from tests.support.spawning import spawn
from tests.support.sweeps import sampled

pytestmark = pytest.mark.distributed

BOUND = 4e-6
"""Of a log-probability in fp32; see tests/rollouts/test_kept_turns.py."""
LAYOUTS: dict[tuple[str, str], tuple[int, dict[str, object]]] = {
    ("qwen3", "tensor"): (2, {"parallel.tensor": 2}),
    ("qwen3", "tensor without sequence"): (2, {"parallel.tensor": 2, "parallel.sequence": "false"}),
    ("qwen3", "pipeline"): (2, {"parallel.pipeline": 2, "parallel.virtual": 1}),
    ("qwen3", "interleaved"): (2, {"parallel.pipeline": 2, "parallel.virtual": 2}),
    ("qwen3", "parameters"): (2, {"parallel.shard": "parameters"}),
    ("qwen3", "context"): (2, {"parallel.context": 2}),
    ("qwen3", "tensor, pipeline"): (4, {"parallel.tensor": 2, "parallel.pipeline": 2, "parallel.virtual": 1}),
    ("qwen3 moe", "experts"): (2, {"parallel.expert": 2}),
    ("qwen3 moe", "tensor, experts"): (2, {"parallel.tensor": 2, "parallel.expert": 2}),
    ("gemma3", "pipeline"): (2, {"parallel.pipeline": 2, "parallel.virtual": 1}),
    ("qwen3.5", "tensor"): (2, {"parallel.tensor": 2}),
    ("qwen3.5", "pipeline"): (2, {"parallel.pipeline": 2, "parallel.virtual": 1}),
}
QUICK = (("qwen3 moe", "experts"), ("qwen3.5", "pipeline"))


def _settings(folder: Path, name: str, **changes: object) -> dict[str, object]:
    """Fewer slots than conversations, and places for more of them than there are slots."""
    adapted: Any = ["q_proj", "v_proj", "o_proj"] if "moe" in name else "all-linear"
    return family_settings(
        folder, name, tools=True, adapted=adapted, sizes={"num_experts": 4} if "moe" in name else {}, rollout__slots=6,
        rollout__environment_workers=9, train__global_batch_size=16, train__micro_batch_size=1, **changes,
    )  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Talked]:
    return lru_cache(lambda name: talked(_settings(tmp_path_factory.mktemp("alone"), name)))


@pytest.mark.parametrize(("name", "layout"), sampled(LAYOUTS, QUICK))
def test_conversations_are_those_of_one_process(
    name: str, layout: str, alone: Callable[[str], Talked], tmp_path: Path
) -> None:
    """Fails where ranks disagree about what is kept, or where a row lies; hangs where they run other passes."""
    expected, (world, changes) = alone(name), LAYOUTS[name, layout]
    ranks = spawn(talked, world=world, args=({**_settings(tmp_path, name), **changes},), timeout=180)
    turns = sum(count - (name == "qwen3.5") for own in expected.turns for count in own)
    for found in ranks:
        assert found.tokens == expected.tokens
        assert max(found.distance, expected.distance) < BOUND
        assert found.used == 0
    # copies of the model have conversations of their own
    copies = world // (int(str(changes.get("parallel.tensor", 1))) * int(str(changes.get("parallel.pipeline", 1))))
    computed = sum(found.computed for found in ranks) * copies // world
    assert expected.computed == computed == sum(map(len, expected.prompts[::4])) + turns
