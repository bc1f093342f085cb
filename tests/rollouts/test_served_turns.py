"""Turns that a server samples: it gets the ids of the conversation so far, and the trainer agrees about all of them."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from engine.rollouts.source import RolloutSource
from tests.support.agent_runs import agent_settings
from tests.support.completion_stand_in import StandIn
from tests.support.rollout_runs import prepared
from tests.support.served_runs import save_weights
from tests.support.tool_runs import tool_settings


def test_a_server_continues_conversations(tmp_path: Path) -> None:
    settings = tool_settings(tmp_path, train__steps=1, train__global_batch_size=16, rollout__slots=4)
    save_weights(tmp_path / "model")
    del settings["model.init"]
    with StandIn(tmp_path / "model") as server, ExitStack() as opened:
        run = prepared(settings | {"rollout.server": server.url}, opened)
        rows = next(iter(run.source.stream(0, 0, 1)))
        assert isinstance(run.source, RolloutSource) and run.source.buffer is not None
        buffer = run.source.buffer
    assert rows.figures["sampler_outside"] == 0 and rows.figures["turns/mean"] > 1.1
    asked = [tuple(one.body["prompt"]) for one in server.calls if one.path == "/v1/completions"]
    assert buffer.old_logps is not None
    for place, one in enumerate(buffer.completions):
        assert one.written is not None and one.turns is not None
        np.testing.assert_allclose(buffer.old_logps[place][~one.written], one.logps[~one.written], atol=1e-4)
        record = run.data.train.prompts.prompts[int(buffer.prompts[place // 4])]  # type: ignore[attr-defined]
        prompt = record.ids if one.prompt is None else tuple(one.prompt.tolist())
        # each turn was asked for with all ids before it
        starts = [0, *(np.flatnonzero(np.diff(one.written.astype(int)) == -1) + 1).tolist()]
        assert len(starts) == one.turns.turns
        assert all((*prompt, *one.tokens[:start].tolist()) in asked for start in starts)


def test_a_server_answers_an_agent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The agent's own records hold the tokens that are trained on; the server was asked with all ids before them."""
    settings = agent_settings(
        tmp_path, "warm", train__steps=1, train__global_batch_size=16, rollout__slots=4, rollout__environment_workers=4
    )
    save_weights(tmp_path / "model")
    del settings["model.init"]
    with StandIn(tmp_path / "model") as server, ExitStack() as opened:
        run = prepared(settings | {"rollout.server": server.url}, opened)
        rows = next(iter(run.source.stream(0, 0, 1)))
        assert isinstance(run.source, RolloutSource) and run.source.buffer is not None
        buffer = run.source.buffer
    assert rows.figures["turns/mean"] > 1.1 and buffer.old_logps is not None
    assert capsys.readouterr().err.count("rollout.agent asks for temperature 0.3") == 1
    asked = [tuple(one.body["prompt"]) for one in server.calls if one.path == "/v1/completions"]
    recorded = {}
    for file in tmp_path.glob("*.jsonl"):
        for line in file.read_text(encoding="utf-8").splitlines() if file.stem.isdigit() else ():
            answers = json.loads(line)
            prompts = [tuple(each["prompt_token_ids"]) for each in answers]
            assert all(prompt in asked for prompt in prompts)
            recorded[(*prompts[-1], *answers[-1]["choices"][0]["token_ids"])] = len(answers)
    assert len(buffer.completions) == 16
    for place, one in enumerate(buffer.completions):
        assert one.prompt is not None and one.written is not None and one.turns is not None
        assert recorded[(*one.prompt.tolist(), *one.tokens.tolist())] == one.turns.turns
        np.testing.assert_allclose(buffer.old_logps[place][~one.written], one.logps[~one.written], atol=1e-4)
