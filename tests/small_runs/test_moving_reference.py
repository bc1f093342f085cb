"""Runs whose reference moves: its numbers from those of checkpoints, and a run that resumes. See also TRL's in
tests/parity/test_trl_grpo.py."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from engine.errors import UserError
from tests.support.rollout_runs import final_state, records, rollout_settings, run_here

EVERY, ALPHA, STEPS = 2, 0.25, 6


def _settings(folder: Path, **changes: object) -> dict[str, object]:
    """Three steps a buffer, so that the reference moves inside of buffers too."""
    return rollout_settings(
        folder, train__steps=STEPS, objective__beta=0.3, objective__reference_sync_steps=EVERY,
        objective__reference_mixup_alpha=ALPHA, rollout__steps_per_generation=3, checkpoint__every=1,
        checkpoint__keep=0, **changes,
    )  # fmt: skip


def test_factors_are_mixed_and_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    """A checkpoint has the reference before it moves after the same step. The begin is known as B is zero there."""
    settings = _settings(tmp_path)
    run_here(settings)
    states = {step: final_state(tmp_path / "run", step) for step in range(1, STEPS + 1)}
    names = [name.removeprefix("master/") for name in states[1] if name.startswith("master/")]
    assert names and any("lora_B" in name for name in names)
    for name in names:
        known = states[1][f"reference/{name}"].double()
        assert ("lora_B" in name) == (not known.any()), "which is the model that the run began with"
        for step in range(2, STEPS + 1):
            if (step - 1) % EVERY == 0:
                known = (1 - ALPHA) * known + ALPHA * states[step - 1][f"master/{name}"].double()
            found = states[step][f"reference/{name}"].double()
            torch.testing.assert_close(found, known, rtol=1e-6, atol=1e-9)
    losses = [record["loss"] for record in records(tmp_path / "run")]
    assert [record["kl"] > 0 for record in records(tmp_path / "run")] == [False, *[True] * (STEPS - 1)]
    for step in (3, 4, 5, 6):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_{step:08d}")
    run_here(settings)
    assert [record["loss"] for record in records(tmp_path / "run")] == losses
    again = final_state(tmp_path / "run", STEPS)
    assert again.keys() == states[STEPS].keys()
    assert [name for name in again if not torch.equal(again[name], states[STEPS][name])] == []


@pytest.mark.slow
def test_a_copy_after_each_step_has_no_divergence(tmp_path: Path) -> None:
    """The reference is then the model before the step."""
    settings = _settings(tmp_path) | {"objective.reference_sync_steps": 1, "objective.reference_mixup_alpha": 1}
    settings |= {"rollout.steps_per_generation": 1, "train.steps": 3, "trainable": "lm_head"}
    run_here(settings)
    assert max(record["kl"] for record in records(tmp_path / "run")) < 1e-9
    assert all(record["grad_norm"] > 0 for record in records(tmp_path / "run"))


@pytest.mark.slow
def test_a_checkpoint_without_one_is_refused(tmp_path: Path) -> None:
    settings = _settings(tmp_path) | {"train.steps": 3}
    plain = {name: value for name, value in settings.items() if not name.startswith("objective.reference")}
    run_here(plain)
    with pytest.raises(UserError, match="is of a run whose reference did not move, and has none: remove objective.ref"):
        run_here(settings | {"train.steps": 4})
