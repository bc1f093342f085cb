"""Completions that an agent drives against the run's endpoint: their tokens, log-probabilities, and failures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.config.load import load_config
from engine.data.dataset import TokenDataset
from engine.rollouts.agents.agent import timeout_note
from engine.rollouts.buffer import Buffer
from engine.rollouts.data.completions import Completion, completion_columns
from engine.rollouts.data.prompts import Prompt, PromptLoader
from engine.rollouts.sampler import Sampled
from engine.rollouts.source import RolloutSource
from engine.rollouts.token_logps import token_logps
from engine.rollouts.trained_sampler import TrainedSampler
from engine.rollouts.weights import Weights
from engine.training.prepared_run import PreparedRun
from tests.support.agent_runs import agent_settings
from tests.support.commands import options
from tests.support.rollout_runs import prepared
from tests.support.tool_runs import ENDS

_ENDS = frozenset(range(len(ENDS)))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run whose factors B are drawn; no test takes a step."""
    with ExitStack() as opened:
        found = prepared(agent_settings(tmp_path_factory.mktemp("run"), lora__rank=3), opened)
        generator = torch.Generator().manual_seed(3)
        for shard in found.training.optimizer.flat.master_shards():
            if shard.name.endswith("lora_B"):
                shard.tensor.copy_(torch.randn(shard.tensor.shape, generator=generator) * 0.3)
        found.training.optimizer.flat.publish()
        yield found


def prompts_of(run: PreparedRun, count: int) -> list[Prompt]:
    assert isinstance(run.data.train, PromptLoader)
    return list(run.data.train.prompts.prompts[:count])


def sampled(
    run: PreparedRun, prompts: Sequence[Prompt], *, name: str = "door", said: list[str] | None = None, **rollout: Any
) -> list[Sampled]:
    file = str(run.config.rollout.agent).rpartition(":")[0]
    config = replace(run.config, rollout=replace(run.config.rollout, agent=f"{file}:{name}", **rollout))
    talk = run.data.tools.talk(config, ends=_ENDS, vocabulary=128)  # type: ignore[attr-defined]
    say = print if said is None else said.append
    sampler = TrainedSampler(config, run.training, ends=_ENDS, longest_prompt=16, say=say, talk=talk)
    try:
        return sampler.take(prompts, generation=0, step=0)[0]
    finally:
        sampler.close(failed=False)


def test_tokens_are_those_that_were_sent_and_sampled(run: PreparedRun) -> None:
    """The agents' own records of the answers they got are the oracle for tokens, the trainer for log-probabilities."""
    folder = Path(str(run.config.rollout.agent).rpartition("/")[0])
    for one in folder.glob("*.jsonl"):
        if one.stem.isdigit():
            one.unlink()
    prompts = prompts_of(run, 14)
    found = sampled(run, prompts)
    assert sum(one.turns.turns > 1 for one in found if one.turns is not None) > 8
    documents = []
    for number in range(14):
        records = [json.loads(line) for line in (folder / f"{number}.jsonl").read_text("utf-8").splitlines()]
        of_prompt = found[4 * number : 4 * number + 4]
        by_tokens = {tuple(one.tokens.tolist()): one for one in of_prompt}
        assert len(records) == len(by_tokens) == 4, number
        for answers in records:
            last = answers[-1]["choices"][0]["token_ids"]
            prompt, whole = answers[0]["prompt_token_ids"], [*answers[-1]["prompt_token_ids"], *last]
            one = by_tokens[tuple(whole[len(prompt) :])]
            assert one.prompt is not None and one.prompt.tolist() == prompt and one.written is not None
            own = [token for each in answers for token in each["choices"][0]["token_ids"]]
            logps = [part["logprob"] for each in answers for part in each["choices"][0]["logprobs"]["content"]]
            assert one.tokens[~one.written].tolist() == own
            assert one.logps[~one.written] == pytest.approx(logps, abs=1e-7) and (one.logps[one.written] == 0).all()
            assert one.turns is not None and one.turns.turns == len(answers) and one.turns.branches == 1
            assert one.dialogue is not None and one.dialogue.failure is None
            opened = sum(len(each["choices"][0]["message"].get("tool_calls", ())) for each in answers)
            assert one.metrics == {"opened": opened} and one.dialogue.reward == float(opened > 0)
            assert len(one.tokens) <= 24
            documents.append(
                Completion(
                    prompt=prompt, tokens=one.tokens.tolist(), sampled_logps=one.logps.tolist(), advantage=0.0,
                    written=one.written.tolist(),
                )
            )  # fmt: skip
    dataset = TokenDataset(completion_columns(documents, "tokens"), seq_length=64, packing=True)
    logps = token_logps(run.config, run.training.mesh, run.training.stages, dataset)
    ends = (dataset.starts + dataset.lengths).tolist()
    for end, document in zip(ends, documents, strict=True):
        count = len(document.tokens)
        assert logps[end - count : end] == pytest.approx(document.sampled_logps, abs=4e-6)


@pytest.mark.parametrize("name", ["door", "parallel"])
def test_numbers_do_not_depend_on_when_agents_ask(run: PreparedRun, name: str) -> None:
    """Nor on the order of requests that come at the same time, of which two are the same and get two answers."""
    prompts = prompts_of(run, 3)
    first, *others = (sampled(run, prompts, name=name, environment_workers=workers) for workers in (1, 5, 5))
    for other in others:
        for one, another in zip(first, other, strict=True):
            assert one.tokens.tolist() == another.tokens.tolist() and one.turns == another.turns
            # which of several branches is continued in the cache depends on the order: that is rounding
            if name == "parallel":
                assert one.logps == pytest.approx(another.logps, abs=4e-6)
            else:
                assert np.array_equal(one.logps, another.logps)
    if name == "parallel":
        counts = [one.turns for one in first if one.turns is not None]
        assert all(one.branches == 3 and one.left_out > 0 for one in counts)
        assert len({tuple(one.tokens.tolist()) for one in first}) > 6


def test_a_failure_costs_its_completion_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = agent_settings(
        tmp_path, "Hostile", train__steps=1, train__global_batch_size=32, rollout__show=0, rollout__agent_timeout=4,
        rollout__environment_workers=8,
    )  # fmt: skip
    lines = (tmp_path / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines[:8]) + "\n", encoding="utf-8")
    with ExitStack() as opened:
        found = prepared(settings, opened)
        next(iter(found.source.stream(0, 0, 1)))
        assert isinstance(found.source, RolloutSource) and found.source.buffer is not None
        buffer = found.source.buffer
    rewards = dict(zip(buffer.prompts.tolist(), buffer.rewards_NF.reshape(8, 4), strict=True))
    assert all(np.isnan(rewards[number]).all() for number in range(7)) and rewards[7].tolist() == [0.25] * 4
    said = capsys.readouterr().err
    for words in (
        "it returned without a request that could be answered", "its process ended by SIGKILL",
        "it did not come to an end within 4 s", "it raised RuntimeError: no way", "its reward is nan",
    ):  # fmt: skip
        assert words in said, words


@pytest.mark.parametrize(
    ("world", "changes", "notes"),
    [
        (2, {}, True),
        (2, {"rollout__agent_timeout": 500}, False),
        (2, {"parallel__tensor": 2}, False),
        (4, {"parallel__tensor": 2}, True),
        (2, {"rollout__server": "http://a"}, False),
        (1, {}, False),
    ],
)
def test_a_conversation_may_take_longer_than_ranks_wait(
    world: int, changes: dict[str, Any], notes: bool, tmp_path: Path
) -> None:
    found = timeout_note(load_config(options(agent_settings(tmp_path, **changes))), world)
    assert (found is not None) == notes
    assert found is None or "rollout.agent_timeout is 3600 s, and the 2 copies of the model" in found


def test_a_buffer_of_agents_is_the_same_after_it_was_saved(run: PreparedRun) -> None:
    prompts = prompts_of(run, 2)
    completions = [one.sampled_by(3) for one in sampled(run, prompts)]
    buffer = Buffer(
        generation=0, prompts=np.arange(2), completions=tuple(completions), rewards_NF=np.zeros((8, 1)),
        advantages=np.zeros(8, dtype=np.float32), uniform=np.zeros(2, dtype=np.bool_), num_steps=2, iterations=1,
        weights=(Weights(3, "00ff" * 8),),
    )  # fmt: skip
    read = Buffer.from_bytes(buffer.to_bytes(), Path("b"), generation=0, num_steps=2, iterations=1)
    for one, other in zip(completions, read.completions, strict=True):
        assert (one.turns, one.truncated, one.metrics) == (other.turns, other.truncated, other.metrics)
    assert read.to_bytes() == buffer.to_bytes() and any(one.metrics["opened"] for one in completions)
