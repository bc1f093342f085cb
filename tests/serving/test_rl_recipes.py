"""Recipes of reinforcement learning on a server of a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.serving.cookbook import MARKS, NAME, run
from tests.serving.running import RunningServer

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytestmark = MARKS


_MATH: dict[str, Any] = {
    "renderer_name": "role_colon", "lora_rank": 4, "groups_per_batch": 4, "group_size": 4, "learning_rate": 1e-3,
    "max_tokens": 12, "max_steps": 3, "eval_every": 0, "save_every": 0,
}  # fmt: skip


def _check_numerics(steps: list[dict[str, float]]) -> None:
    """The sampler's numbers are the trainer's."""
    apart = [abs(one["optim/kl_sample_train_v1"]) for one in steps if "optim/kl_sample_train_v1" in one]
    print(f"sampler and trainer: {max(apart):.1e}")
    assert apart and max(apart) < 1e-6


def test_math_rl(server: RunningServer, work: Path) -> None:
    _check_numerics(run(server, work, "math_rl.train", env="arithmetic", loss_fn="importance_sampling", **_MATH))


@pytest.mark.parametrize("layout", ["--tensor", "--pipeline", "--context", "--data"])
def test_math_rl_over_two_ranks(layout: str, work: Path, tmp_path: Path) -> None:
    server = RunningServer(work / NAME, tmp_path / "state", "--name", NAME, layout, "2")
    try:
        _check_numerics(run(server, work, "math_rl.train", env="arithmetic", loss_fn="importance_sampling", **_MATH))
        assert server.stop() == 0
    finally:
        server.kill()


def test_ppo_with_substeps(server: RunningServer, work: Path) -> None:
    steps = run(
        server, work, "math_rl.train", env="arithmetic", loss_fn="ppo", num_substeps=2, compute_post_kl=True, **_MATH
    )
    assert any(abs(one.get("kl_pre_post_v1", 0.0)) > 0 for one in steps), "a step changes the policy"
    assert len(steps) >= 3


def test_asynchronous_cispo(server: RunningServer, work: Path) -> None:
    steps = run(server, work, "math_rl.train", env="arithmetic", loss_fn="cispo", max_steps_off_policy=1, **_MATH)
    assert len(steps) >= 3


def test_gsm8k_with_gspo(server: RunningServer, work: Path) -> None:
    _check_numerics(run(server, work, "math_rl.train", env="gsm8k", loss_fn="gspo", **_MATH))


def test_numerics_check(server: RunningServer, work: Path) -> None:
    pages = {"task.num_pages_min": 2, "task.num_pages_max": 3, "task.page_chars": 300}
    steps = run(
        server, work, "rl_numerics_check.train", renderer_name="qwen3", lora_rank=4, groups_per_batch=2, group_size=2,
        max_tokens=24, max_trajectory_tokens=7000, max_steps=2, save_every=0, **pages,
    )  # fmt: skip
    _check_numerics(steps)


def test_games_of_several_turns(server: RunningServer, work: Path) -> None:
    steps = run(
        server, work, "multiplayer_rl.guess_number.train", renderer_name="role_colon", batch_size=2, group_size=2,
        max_tokens=8, max_steps=2, eval_every=0, save_every=0,
    )  # fmt: skip
    assert len(steps) >= 2


def test_rewards_of_pairs(server: RunningServer, work: Path) -> None:
    steps = run(
        server, work, "preference.shorter.train", renderer_name="role_colon", batch_size=2, group_size=4, max_tokens=12,
        max_steps=2, eval_every=0,
    )  # fmt: skip
    assert len(steps) >= 2
