"""Completions of several turns by the model that trains: their tokens, their log-probabilities, and their buffer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.data.dataset import TokenDataset
from engine.rollouts.buffer import Buffer
from engine.rollouts.data.completions import Completion, completion_columns
from engine.rollouts.data.prompts import Prompt, PromptLoader
from engine.rollouts.sampler import Sampled
from engine.rollouts.source import RolloutSource
from engine.rollouts.token_logps import token_logps
from engine.rollouts.trained_sampler import TrainedSampler
from engine.rollouts.weights import Weights
from engine.training.prepared_run import PreparedRun
from tests.support.rollout_runs import prepared
from tests.support.tool_runs import ENDS, tool_settings

_ENDS = frozenset(range(len(ENDS)))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run whose factors B are drawn; no test takes a step."""
    with ExitStack() as opened:
        found = prepared(tool_settings(tmp_path_factory.mktemp("run"), lora__rank=3), opened)
        generator = torch.Generator().manual_seed(3)
        for shard in found.training.optimizer.flat.master_shards():
            if shard.name.endswith("lora_B"):
                shard.tensor.copy_(torch.randn(shard.tensor.shape, generator=generator) * 0.3)
        found.training.optimizer.flat.publish()
        yield found


def prompts_of(run: PreparedRun, count: int) -> list[Prompt]:
    assert isinstance(run.data.train, PromptLoader)
    return list(run.data.train.prompts.prompts[:count])


def sampled(run: PreparedRun, prompts: Sequence[Prompt], **rollout: Any) -> list[Sampled]:
    config = replace(run.config, rollout=replace(run.config.rollout, **rollout))
    talk = run.data.tools.talk(config, ends=_ENDS, vocabulary=128)  # type: ignore[attr-defined]
    sampler = TrainedSampler(config, run.training, ends=_ENDS, longest_prompt=16, say=print, talk=talk)
    try:
        return sampler.sample(prompts, generation=0)
    finally:
        sampler.close(failed=False)


def test_tokens_only_grow_and_their_probabilities_are_the_trainers(run: PreparedRun) -> None:
    """Tokens that were made from text again, or a turn that is continued at another place, differ at once."""
    prompts = prompts_of(run, 8)
    found = sampled(run, prompts)
    show = run.data.tokenizer.show
    assert {one.turns.turns for one in found if one.turns is not None} >= {1, 2, 3}
    documents = []
    for place, one in enumerate(found):
        prompt, dialogue = prompts[place // 4], one.dialogue
        assert one.written is not None and dialogue is not None and one.turns is not None
        assert len(one.tokens) == len(one.logps) == len(one.written) <= 24 and dialogue.failure is None
        assert (one.logps[one.written] == 0).all() and (one.logps[~one.written] < 0).all()
        # what reset() returned stands in the prompt, of every third record
        number = prompt.columns["number"]
        assert (one.prompt is not None) == (number % 3 == 0)
        ids = prompt.ids if one.prompt is None else tuple(one.prompt.tolist())
        assert show(ids).endswith(f"{prompt.given[0]['content']}{'abc' if number % 3 == 0 else ''}<assistant>")
        # between two turns stand the results of the calls in the one before
        parts = np.split(one.tokens, np.flatnonzero(np.diff(one.written)) + 1)
        roles = [message["role"] for message in dialogue.messages]
        assert roles.count("assistant") == one.turns.turns == len(parts[::2])
        between = [show(part.tolist()) for part in parts[1::2]]
        results = [message["content"] for message in dialogue.messages if message["role"] == "tool"]
        assert "".join(between) == "".join(
            "<result>" + text + ("<assistant>" if last else "")
            for text, last in zip(results, _lasts(roles), strict=True)
        ).replace("\n", "\ufffd")
        assert all(part[-1] in _ENDS for part in parts[:-1:2]) and one.truncated == (parts[-1][-1] not in _ENDS)
        opened = sum("open_door" in show(part.tolist()) for part in parts[::2])
        assert (dialogue.reward or 0) <= opened and (opened == 0 or one.turns.calls > 0 or one.truncated)
        documents.append(
            Completion(
                prompt=ids, tokens=one.tokens.tolist(), sampled_logps=one.logps.tolist(), advantage=0.0,
                written=one.written.tolist(),
            )
        )  # fmt: skip
    dataset = TokenDataset(completion_columns(documents, "tokens"), seq_length=64, packing=True)
    logps, ends = (
        token_logps(run.config, run.training.mesh, run.training.stages, dataset),
        (dataset.starts + dataset.lengths).tolist(),
    )
    for end, one in zip(ends, found, strict=True):
        assert logps[end - len(one.tokens) : end] == pytest.approx(one.logps, abs=4e-6)


def _lasts(roles: list[str]) -> list[bool]:
    """Whether each result is the last of its turn."""
    following = [*roles[1:], "assistant"]
    return [after != "tool" for role, after in zip(roles, following, strict=True) if role == "tool"]


def test_numbers_do_not_depend_on_when_environments_answer(run: PreparedRun) -> None:
    """Which of them are ready together depends on the machine. With prompts that share a pass, bits would too."""
    prompts = prompts_of(run, 4)
    first, *others = (sampled(run, prompts, environment_workers=workers) for workers in (1, 5))
    for other in others:
        for one, another in zip(first, other, strict=True):
            assert one.tokens.tolist() == another.tokens.tolist() and np.array_equal(one.logps, another.logps)
    for one, another in zip(sampled(run, prompts, slots=3), first, strict=True):
        assert one.tokens.tolist() == another.tokens.tolist()
        assert one.logps == pytest.approx(another.logps, abs=4e-6)


def test_turns_end_at_their_limit(run: PreparedRun) -> None:
    """The last turn's calls are not answered, and so not made; nor is what has no room behind it kept."""
    prompts = prompts_of(run, 8)
    one_turn = sampled(run, prompts, max_turns=1)
    assert all(one.turns is not None and one.turns.turns == 1 and one.turns.calls == 0 for one in one_turn)
    assert any(one.dialogue is not None and "tool_calls" in one.dialogue.messages[-1] for one in one_turn)
    longer = sampled(run, prompts)
    for one, other in zip(one_turn, longer, strict=True):
        assert other.tokens[: len(one.tokens)].tolist() == one.tokens.tolist()
    cut = sampled(run, prompts, max_completion_length=9)
    assert max(len(one.tokens) for one in cut) <= 9
    left_out = [one for one in cut if one.turns is not None and one.turns.calls and one.turns.turns == 1]
    assert left_out and all(one.written is not None and not one.written.any() for one in left_out)


def test_a_buffer_with_turns_is_the_same_after_it_was_saved(run: PreparedRun) -> None:
    assert isinstance(run.source, RolloutSource)
    prompts = prompts_of(run, 2)
    completions = [one.sampled_by(place % 2) for place, one in enumerate(sampled(run, prompts))]
    completions[0] = replace(completions[0], failed=True)
    assert {one.prompt is None for one in completions} == {True, False}
    weights = (Weights(0, "00ff" * 8), Weights(1, "12ab" * 8))
    buffer = Buffer(
        generation=0, prompts=np.arange(2), completions=tuple(completions), rewards_NF=np.zeros((8, 1)),
        advantages=np.zeros(8, dtype=np.float32), uniform=np.zeros(2, dtype=np.bool_), num_steps=2, iterations=1,
        weights=weights,
    )  # fmt: skip
    read = Buffer.from_bytes(buffer.to_bytes(), Path("b"), generation=0, num_steps=2, iterations=1)
    for one, other in zip(completions, read.completions, strict=True):
        for name in ("tokens", "logps", "written", "prompt", "versions"):
            mine, theirs = getattr(one, name), getattr(other, name)
            assert (mine is None and theirs is None) or (mine.dtype == theirs.dtype and np.array_equal(mine, theirs))
        assert (one.turns, one.truncated, one.failed) == (other.turns, other.truncated, other.failed)
    assert read.weights == weights and read.to_bytes() == buffer.to_bytes()


FAULTY = '''
import os
from env import Door


class Faulty(Door):
    def open_door(self, hand: int) -> str:
        """Opens the door.

        Args:
            hand: Which one.
        """
        if self.number == 1:
            os._exit(7)
        return "x" * 2**20 if self.number == 2 else super().open_door(hand)

    def reset(self, number, **columns):
        if number == 3:
            raise RuntimeError("no door")
        return super().reset(number, **columns)
'''


def test_a_failure_costs_its_completion_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The environment fails on records 1 and 3; the results of record 2 are so long that conversations end."""
    settings = tool_settings(tmp_path, train__steps=1, train__global_batch_size=16, rollout__show=0)
    lines = (tmp_path / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines[:4]) + "\n", encoding="utf-8")
    (tmp_path / "faulty.py").write_text(FAULTY, encoding="utf-8")
    settings["rollout.environment"] = f"{tmp_path}/faulty.py:Faulty"
    with ExitStack() as opened:
        found = prepared(settings, opened)
        rows = next(iter(found.source.stream(0, 0, 1)))
        assert isinstance(found.source, RolloutSource) and found.source.buffer is not None
        buffer = found.source.buffer
    rewards = dict(zip(buffer.prompts.tolist(), buffer.rewards_NF.reshape(4, 4), strict=True))
    assert np.isnan(rewards[3]).all() and np.isnan(rewards[1]).any() and not np.isnan(rewards[1]).all()
    assert not np.isnan([rewards[0], rewards[2]]).any()
    at = buffer.prompts.tolist().index(2) * 4
    calls = [one.turns.calls for one in buffer.completions[at : at + 4] if one.turns is not None]
    assert max(calls) > 0, "of record 2 nothing was called"
    assert rows.figures["unscored"] == np.isnan(buffer.rewards_NF).mean()
    said = capsys.readouterr().err
    assert "warning: step 1: environment gave no reward for a completion of" in said
    assert "3 more: its reset raised RuntimeError: no door" in said
    assert "a call of the tool open_door: its process ended with status 7" in said
