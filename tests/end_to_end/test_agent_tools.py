"""The example of a tool: its parts, and, with -m slow, that a reward behind a tool is learned, and none without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.utils import get_json_schema

from engine.config.load import parse_config
from engine.config.rules import check_config
from engine.data.tokenizer import load_tokenizer
from engine.rollouts.turns.chat import ToolChat
from engine.rollouts.turns.worker import Host
from examples.agent_tools.env import BlankNote, Door
from examples.agent_tools.make_small import write_doors, write_model
from tests.support.commands import REPOSITORY

FOLDER = REPOSITORY / "examples" / "agent_tools"


@pytest.mark.parametrize("name", ["start", "small"])
def test_configurations_are_sound(name: str) -> None:
    given = [] if name == "start" else ["--rollout.environment", f"{FOLDER}/env.py:Door"]
    check_config(parse_config(["--config", str(FOLDER / f"{name}.yaml"), "--data.train", "x.jsonl", *given]))


def test_the_teacher_opens_one_door_in_four_and_describes_the_tools(tmp_path: Path) -> None:
    """With transformers' own template: the prompt of a rollout is how the conversation of its door begins."""
    write_model(tmp_path)
    write_doors(tmp_path)
    lines = (tmp_path / "taught.jsonl").read_text(encoding="utf-8").splitlines()
    taught = [json.loads(line)["messages"] for line in lines]
    prompts = [json.loads(one) for one in (tmp_path / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    codes = {(one["prompt"][0]["content"], one["code"]): one["prompt"] for one in prompts}
    doors = [f"Open door {door}." for door in range(10)]
    assert sorted(codes) == [(door, f"{code:02d}") for door in doors for code in range(100)]
    assert sum("It is open." in one[-1]["content"] for one in taught) == len(codes) == len(taught) / 4
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    door = Door()
    tools = [get_json_schema(door.open_door), get_json_schema(door.read_note)]
    prompt = tokenizer.apply_chat_template(
        prompts[0]["prompt"], tools=tools, add_generation_prompt=True, tokenize=False
    )
    same = next(one for one in taught if one[1:2] == prompts[0]["prompt"] and "open" in one[-1]["content"])
    whole = tokenizer.apply_chat_template(same, tokenize=False)
    assert whole.startswith(prompt) and "<tool_response>" in whole
    ids = tokenizer(whole)["input_ids"]
    assert tokenizer.unk_token_id not in ids and tokenizer.decode(ids) == whole


def test_the_template_shows_calls_and_results(tmp_path: Path) -> None:
    write_model(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    chat = ToolChat(tokenizer, frozenset({0}), Host([], Door).description()["schemas"], None)
    assert chat.tool_format == "hermes" and chat.check() == []


@pytest.mark.parametrize(("environment", "reward"), [(Door, 1.0), (BlankNote, 0.0)])
def test_only_the_note_opens_the_door(environment: type[Door], reward: float) -> None:
    host = Host([], environment)
    host.answer({"do": "reset", "columns": {"code": "07", "prompt": []}})
    note = host.answer({"do": "call", "name": "read_note", "arguments": {}})["result"]
    opened = host.answer({"do": "call", "name": "open_door", "arguments": {"code": note}})["result"]
    assert opened == ("It opens." if reward else "It stays shut.")
    assert host.answer({"do": "reward"}) == {"reward": reward}
    host.answer({"do": "reset", "columns": {"code": "08", "prompt": []}})
    assert host.answer({"do": "reward"}) == {"reward": 0.0}


def trained(out: Path, environment: str, *more: str) -> list[dict[str, Any]]:
    """The records of the second training, whose first is made once in a folder."""
    own = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "ENVIRONMENT": environment}
    command = ["bash", str(FOLDER / "run.sh"), str(out), "--train.steps", "24", *more]
    done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    lines = (out / environment / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if "reward" in record]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_reward_behind_the_tool_rises_and_none_without_what_it_tells(tmp_path: Path) -> None:
    """Four steps have 512 conversations: the standard error of their mean is below 0.023."""
    rewards = {}
    for environment in ("Door", "BlankNote"):
        found = [one["reward"] for one in trained(tmp_path, environment)]
        rewards[environment] = (mean(found[:4]), mean(found[-4:]))
    first, last = rewards["Door"]
    assert first < 0.45 and last > 0.75 and last - first > 0.35, rewards
    assert max(rewards["BlankNote"]) < 0.03, rewards  # a guess is right once in a hundred times


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_seed_gives_the_same_run(tmp_path: Path) -> None:
    """Also with other numbers of processes, whose answers come in another order."""
    short = ("--train.steps", "6")
    found = []
    for workers in ("8", "3"):
        out = tmp_path / workers
        found.append(trained(out, "Door", *short, "--rollout.environment_workers", workers))
    for one, other in zip(*found, strict=True):
        for name in ("loss", "grad_norm", "reward", "turns/mean", "tools/call_frequency", "entropy"):
            assert one[name] == other[name], (one["step"], name)
