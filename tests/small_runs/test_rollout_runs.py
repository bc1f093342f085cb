"""Whole runs that sample what they train on, on one rank."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from statistics import mean

import pytest
import torch

from engine.errors import UserError
from engine.rollouts.buffer import FILE
from engine.rollouts.resuming import is_state
from tests.support.rollout_runs import final_state, records, rollout_settings, run_here, texts
from tests.support.sweeps import sampled

TIMES = {
    "seconds",
    "tokens_per_second",
    "rollout_seconds",
    "reward_seconds",
    "training_seconds",
    "data_stall",
    "memory",
}


def numbers(folder: Path) -> list[dict[str, object]]:
    """Training records without what depends on the machine."""
    kept = [{name: value for name, value in one.items() if name not in TIMES} for one in records(folder)]
    return [{name: value for name, value in one.items() if "utilization" not in name} for one in kept]


def test_the_reward_rises(tmp_path: Path) -> None:
    """With the advantages' sign turned, the reward falls from 0.058 to 0.007."""
    run_here(rollout_settings(tmp_path, train__steps=10, trainable="lm_head", rollout__show=1))
    rewards = [record["reward"] for record in records(tmp_path / "run")]
    assert mean(rewards[-3:]) > mean(rewards[:3]) + 0.1, rewards
    first = records(tmp_path / "run")[0]
    assert first["reward"] == pytest.approx(first["rewards/ones/mean"] + 0.5 * first["rewards/long/mean"])
    assert first["rollout_seconds"] > 0 and first["reward_seconds"] > 0 and first["training_seconds"] > 0
    assert first["completions/mean_length"] <= 6 and 0 <= first["completions/clipped_ratio"] <= 1
    assert len(texts(tmp_path / "run")) == 10


@pytest.mark.parametrize("kept", sampled([3, 4], [3]))
def test_a_run_resumes_inside_a_buffer_and_between_two(kept: int, tmp_path: Path) -> None:
    """Four steps a buffer, two of them with prompts of their own, twice each. Saved after three, the fourth takes the
    buffer from the checkpoint: sampled again from the later weights, its loss would be another."""
    settings = rollout_settings(
        tmp_path, train__steps=6, rollout__steps_per_generation=2, objective__num_iterations=2, checkpoint__every=1,
        checkpoint__keep=0,
    )  # fmt: skip
    run_here(settings)
    whole, state = numbers(tmp_path / "run"), final_state(tmp_path / "run", 6)
    for step in range(kept + 1, 7):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_{step:08d}")
    assert (tmp_path / "run" / "checkpoints" / f"step_{kept:08d}" / FILE).exists() == (kept == 3)
    run_here(settings)
    assert numbers(tmp_path / "run") == whole
    found = final_state(tmp_path / "run", 6)
    assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)


def test_completions_that_are_all_truncated_move_nothing(tmp_path: Path) -> None:
    """No target is left to divide by. Without the mask, or divided by 0, the norm is above 0, or none."""
    settings = rollout_settings(
        tmp_path, train__steps=2, objective__mask_truncated="true", rollout__max_completion_length=1,
    )  # fmt: skip
    run_here(settings)
    for record in records(tmp_path / "run"):
        if record["completions/clipped_ratio"] == 1:
            assert record["loss"] == 0 and record["grad_norm"] == 0 and "entropy" not in record
    assert any(record["completions/clipped_ratio"] == 1 for record in records(tmp_path / "run"))


def test_entropies_are_computed_where_somebody_wants_them(tmp_path: Path) -> None:
    """The trained weights are the same without them."""
    settings = rollout_settings(tmp_path, train__steps=2, guards__liveness_steps=0)
    run_here(settings)
    run_here(settings | {"objective.report_entropy": "false", "checkpoint.dir": tmp_path / "without"})
    assert all("entropy" in record for record in records(tmp_path / "run"))
    assert not any("entropy" in record for record in records(tmp_path / "without"))
    found, expected = (final_state(tmp_path / name, 2) for name in ("without", "run"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_end_tokens_that_the_model_does_not_have_are_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Names that are no tokens were left out unseen, or were a traceback in a list."""
    settings = rollout_settings(tmp_path, train__steps=1)
    ends = tmp_path / "model" / "generation_config.json"
    ends.write_text('{"eos_token_id": [0, 99]}', encoding="utf-8")
    run_here(settings)
    assert "names token 99 as one that ends completions, but its vocabulary has 16 entries" in capfd.readouterr().err
    for value in ('"x"', '[0, "x"]', "[null]"):
        ends.write_text(f'{{"eos_token_id": {value}}}', encoding="utf-8")
        with pytest.raises(UserError, match="has eos_token_id .*, but a token id or a list of them is expected"):
            run_here(settings | {"checkpoint.dir": tmp_path / "other"})


def test_limits_without_effect_are_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = "have nothing to limit: with rollout.steps_per_generation 1 and objective.num_iterations 1"
    settings = rollout_settings(tmp_path, train__steps=1, objective__epsilon_high=0.28)
    run_here(settings)
    assert words in capfd.readouterr().err
    run_here(settings | {"objective.num_iterations": 2, "checkpoint.dir": tmp_path / "twice"})
    assert words not in capfd.readouterr().err


def test_a_damaged_buffer_is_refused(tmp_path: Path) -> None:
    settings = rollout_settings(tmp_path, train__steps=3, rollout__steps_per_generation=2, checkpoint__every=1)
    run_here(settings)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000003")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000002")
    path = tmp_path / "run" / "checkpoints" / "step_00000001" / FILE
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=f"{FILE} is damaged: it is not what was written"):
        run_here(settings)


def test_a_buffer_is_not_resumed_with_other_prompts_or_options(tmp_path: Path) -> None:
    """Without the refusals, other prompts are trained with the old completions, and one reward fewer is a traceback."""
    settings = rollout_settings(tmp_path, train__steps=1, rollout__steps_per_generation=2)
    run_here(settings)
    settings["train.steps"] = 2
    folder = tmp_path / "run" / "checkpoints" / "step_00000001"
    changed: list[tuple[dict[str, object], str]] = [
        ({"rollout.rewards": f"{tmp_path}/rewards.py:ones", "rollout.reward_weights": "[]"}, "rollout.rewards"),
        ({"rollout.reward_weights": "[]"}, "rollout.rewards"),
        ({"rollout.overlong_buffer": 2}, "rollout.overlong_buffer null, and rollout.overlong_buffer is 2 now"),
        ({"rollout.num_generations": 8}, "rollout.num_generations 4, and rollout.num_generations is 8 now"),
        ({"rollout.temperature": 0.5}, "rollout.temperature 1.0"),
        ({"train.global_batch_size": 16}, "train.global_batch_size 32"),
        ({"data.seq_length": 24}, "data.seq_length 32"),
    ]
    for options, words in changed:
        with pytest.raises(UserError, match=f"{folder} lies inside a buffer .* made with {re.escape(words)}"):
            run_here(settings | options)
    path = tmp_path / "prompts.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[::-1]), encoding="utf-8")
    with pytest.raises(UserError, match="completions of other prompts than data.train has now: give the data"):
        run_here(settings)
    path.write_text("".join(lines), encoding="utf-8")
    run_here(settings)


@pytest.mark.parametrize(
    "change", [{"num_steps": 0}, {"num_steps": None}, {"taken": 2}, {"options": None}, {"generation": True}]
)
def test_a_state_of_no_buffer(change: dict[str, object]) -> None:
    whole = {"generation": 1, "prompts": 8, "taken": 1, "num_steps": 2, "iterations": 1, "options": {}}
    whole["weights"] = {"0": "ab"}
    assert is_state(whole) and is_state({"generation": 0, "prompts": 0, "weights": {}})
    assert not is_state({name: value for name, value in (whole | change).items() if value is not None})


def test_groups_without_variance_are_left_out_and_counted(tmp_path: Path) -> None:
    """Every completion gets 1: all groups but the one that stays in a step, so that it has rows, are dropped."""
    settings = rollout_settings(
        tmp_path, train__steps=2, rollout__reward_weights="[]", rollout__drop_uniform_groups="true"
    )
    settings["rollout.rewards"] = "['regex:.*']"
    run_here(settings)
    for record in records(tmp_path / "run"):
        assert record["reward"] == 1 and record["uniform_groups"] == 1 and record["groups_dropped"] == 7
        assert record["grad_norm"] == 0


def test_a_reward_that_fails_everywhere_stops_the_run(tmp_path: Path) -> None:
    settings = rollout_settings(tmp_path)
    (tmp_path / "rewards.py").write_text("def f(**given):\n    raise OSError('gone')\n", encoding="utf-8")
    with pytest.raises(UserError, match="could be scored: f gave no reward for .* 31 more: it raised OSError: gone"):
        run_here({**settings, "rollout.rewards": f"{tmp_path}/rewards.py:f", "rollout.reward_weights": "[]"})


def test_a_completion_without_reward_has_no_advantage(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = rollout_settings(tmp_path, train__steps=2)
    (tmp_path / "rewards.py").write_text(
        "def f(completions, **given):\n"
        "    return [float('nan') if text[:1] in '12345' else float(len(text)) for text in completions]\n",
        encoding="utf-8",
    )
    run_here({**settings, "rollout.rewards": f"{tmp_path}/rewards.py:f", "rollout.reward_weights": "[]"})
    found = records(tmp_path / "run")
    assert all(0 < record["unscored"] < 1 and math.isfinite(record["loss"]) for record in found)
    assert "warning: step 1: reward f gave no reward for a completion of" in capfd.readouterr().err
