"""Completions whose environment failed, or that nothing scored, are in no loss and in no divisor."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.data.dataset import TokenDataset
from engine.errors import UserError
from engine.rollouts.buffer import Buffer
from engine.rollouts.data.completions import Completion, CompletionColumns, completion_columns
from engine.rollouts.objective.policy import row_weight
from engine.rollouts.source import RolloutSource
from tests.support.rollout_runs import prepared, rollout_settings, run_here
from tests.support.sweeps import sampled
from tests.support.tool_runs import tool_settings

FAULTY = """
from env import Door


class Faulty(Door):
    def reset(self, number, **columns):
        if number == 3:
            raise RuntimeError("no door")
        return super().reset(number, **columns)

    def open_door(self, hand: int) -> str:
        \"\"\"Opens the door.

        Args:
            hand: Which one.
        \"\"\"
        if self.number == 1:
            import os

            os._exit(7)
        return super().open_door(hand)
"""
LOSSES = ("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "gspo", "luspo", "sapo", "vespo")


def _settings(folder: Path, records: int = 4, **changes: Any) -> dict[str, object]:
    settings = tool_settings(folder, train__steps=1, train__global_batch_size=4 * records, rollout__show=0, **changes)
    lines = (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    (folder / "prompts.jsonl").write_text("\n".join(lines[4 - records : 4]) + "\n", encoding="utf-8")
    (folder / "faulty.py").write_text(FAULTY, encoding="utf-8")
    return settings | {"rollout.environment": f"{folder}/faulty.py:Faulty"}


def _first(opened: ExitStack, settings: dict[str, object]) -> tuple[Any, RolloutSource, Buffer, Any]:
    """A run, its source and buffer, and the rows of its first step."""
    run = prepared(settings, opened)
    generator = torch.Generator().manual_seed(3)
    for shard in run.training.optimizer.flat.master_shards():
        shard.tensor.add_(0.05 * torch.randn(shard.tensor.shape, generator=generator))
    run.training.optimizer.flat.publish()
    rows = next(iter(run.source.stream(0, 0, 1)))
    assert isinstance(run.source, RolloutSource) and run.source.buffer is not None
    return run, run.source, run.source.buffer, rows


def _without(source: RolloutSource, buffer: Buffer, left_out: np.ndarray, loss: str) -> TokenDataset:
    """The documents of a batch of which the completions that failed never were."""
    prompts = source._loader.prompts.prompts
    documents, old = [], []
    for place, one in enumerate(buffer.completions):
        if left_out[place]:
            continue
        own = prompts[int(buffer.prompts[place // buffer.group])].ids
        ids = own if one.prompt is None else tuple(one.prompt.tolist())
        documents.append(
            Completion(
                prompt=ids,
                tokens=one.tokens.tolist(),
                sampled_logps=one.logps.tolist(),
                advantage=float(buffer.advantages[place]),
                token_advantages=source._token_advantages(buffer, place),
                written=None if one.written is None else one.written.tolist(),
            )
        )
        if buffer.old_logps is not None:
            old += [np.zeros(len(ids), dtype=np.float32), buffer.old_logps[place]]
    dataset = TokenDataset(completion_columns(documents, row_weight(loss)), seq_length=64, packing=True)  # type: ignore[arg-type]
    columns = dataset.extra(CompletionColumns)
    if old and columns is not None:
        dataset.put(replace(columns, old_logps=np.concatenate(old)))
    return dataset


@pytest.mark.parametrize("loss", sampled(LOSSES, ("dapo", "dr_grpo")))
def test_a_batch_is_trained_on_as_if_failed_completions_never_were(loss: str, tmp_path: Path) -> None:
    """With a divergence, and with a teacher but for vespo, which would pull at their tokens too."""
    changes: dict[str, object] = {"objective.loss_type": loss, "objective.beta": 0.1}
    changes |= {} if loss == "vespo" else {"distillation.teachers": "[base]"}
    with ExitStack() as opened:
        run, source, buffer, rows = _first(opened, _settings(tmp_path) | changes)
        failed = np.array([one.failed for one in buffer.completions])
        assert 4 <= failed.sum() < 12 and (np.isnan(buffer.rewards_NF).all(axis=1) == failed).all()
        expected = _without(source, buffer, failed, loss)
        assert source._dataset(buffer, range(4)).fingerprint() == expected.fingerprint()
        loader = source._row_loader(expected)
        assert rows.targets == loader.target_count(0) and rows.rows == len(expected)
        found = []
        for batches in (rows.batches, loader.batches(0)):
            result = run.training.step(batches, rows.targets, 0.0)
            found.append((float(result.loss), float(result.grad_norm)))
    assert found[0] == found[1] and np.isfinite(found).all() and found[0][1] > 0
    whole = [one for one in buffer.completions if not one.failed]
    assert rows.figures["completions/clipped_ratio"] == np.mean([one.truncated for one in whole])
    assert rows.figures["completions/mean_length"] == np.mean([one.num_sampled for one in whole])


def test_teachers_alone_learn_nothing_from_failures(tmp_path: Path) -> None:
    changes = {"rollout.rewards": "[]", "distillation.teachers": "[base]"}
    with ExitStack() as opened:
        _, source, buffer, rows = _first(opened, _settings(tmp_path) | changes)
        failed = np.array([one.failed for one in buffer.completions])
        assert 4 <= failed.sum() < 12
        expected = _without(source, buffer, failed, "dapo")
        assert source._dataset(buffer, range(4)).fingerprint() == expected.fingerprint()
    assert rows.has_signal and np.isfinite(rows.figures["teachers/base/kl"])


def test_a_step_of_failures_alone_moves_nothing(tmp_path: Path) -> None:
    """One row remains, so that there is a batch, without a target."""
    settings = _settings(tmp_path, 1) | {"rollout.rewards": "[]", "distillation.teachers": "[base]"}
    with ExitStack() as opened:
        run, _, buffer, rows = _first(opened, settings)
        assert all(one.failed for one in buffer.completions) and not rows.has_signal
        result = run.training.step(rows.batches, rows.targets, 0.1)
    assert (float(result.loss), float(result.grad_norm)) == (0.0, 0.0)
    assert np.isnan(rows.figures["completions/clipped_ratio"]) and np.isnan(rows.figures["teachers/base/kl"])


def test_completions_that_nothing_scored_are_left_out(tmp_path: Path) -> None:
    rewards = "def some(completions, **columns):\n    return [None, 1.0, 0.0, 1.0] * (len(completions) // 4)\n"
    settings = rollout_settings(tmp_path, train__global_batch_size=8, rollout__show=0) | {"objective.beta": 0.1}
    (tmp_path / "some.py").write_text(rewards, encoding="utf-8")
    settings |= {"rollout.rewards": f"{tmp_path}/some.py:some", "rollout.reward_weights": "[]", "data.seq_length": 64}
    with ExitStack() as opened:
        _, source, buffer, rows = _first(opened, settings)
        unscored = np.isnan(buffer.rewards_NF).all(axis=1)
        assert unscored.tolist() == [True, False, False, False] * 2
        expected = _without(source, buffer, unscored, "dapo")
        assert source._dataset(buffer, range(2)).fingerprint() == expected.fingerprint()
    assert rows.figures["completions/mean_length"] == np.mean([one.num_sampled for one in buffer.completions])


@pytest.mark.slow
def test_a_buffer_is_not_resumed_with_other_turns(tmp_path: Path) -> None:
    settings = tool_settings(
        tmp_path, train__steps=1, rollout__steps_per_generation=2, train__global_batch_size=8, rollout__max_turns=3
    )
    run_here(settings)
    settings["train.steps"] = 2
    for change, words in (
        ({"rollout.max_turns": 2}, "rollout.max_turns 3, and rollout.max_turns is 2 now"),
        ({"rollout.tool_format": "hermes"}, "rollout.tool_format null"),
        ({"rollout.tools": f"{tmp_path}/env.py:open_door", "rollout.environment": "null",
          "rollout.rewards": "regex:a"}, "rollout."),
    ):  # fmt: skip
        with pytest.raises(UserError, match=f"lies inside a buffer .* made with {re.escape(words)}"):
            run_here(settings | change)
