"""The example of GRPO on sums: its parts, and, with -m slow, all of it on one rank and on two."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from statistics import mean

import pytest

from engine.config.load import parse_config
from engine.config.rules import check_config
from engine.data.tokenizer import load_tokenizer
from examples.grpo_arithmetic.make_small import write_model, write_sums
from examples.grpo_arithmetic.summary import table
from tests.support.commands import REPOSITORY
from tests.support.warm_python import warm_python

FOLDER = REPOSITORY / "examples" / "grpo_arithmetic"


@pytest.mark.parametrize("name", ["start", "small", "run"])
def test_configurations_are_sound(name: str) -> None:
    rewards = [] if name == "start" else ["--rollout.rewards", "exact_match"]
    check_config(parse_config(["--config", str(FOLDER / f"{name}.yaml"), "--data.train", "x.jsonl", *rewards]))


def test_the_tokenizer_reads_characters(tmp_path: Path) -> None:
    write_model(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("3+4=7", eos=True)
    assert len(ids) == 6 and ids[-1] == tokenizer.eos_id == 0 and tokenizer.decode(ids) == "3+4=7"


def test_the_teacher_is_right_one_time_in_three(tmp_path: Path) -> None:
    write_sums(tmp_path)
    answers = {}
    for line in (tmp_path / "prompts.jsonl").read_text(encoding="utf-8").splitlines():
        answers[json.loads(line)["prompt"]] = json.loads(line)["answer"]
    lines = (tmp_path / "taught.jsonl").read_text(encoding="utf-8").splitlines()
    right = [answers[one["prompt"]] == one["completion"] for one in map(json.loads, lines)]
    assert all(eval(prompt[:-1]) == int(answer) for prompt, answer in answers.items())
    assert len(right) == 3 * len(answers) and sum(right) == len(answers)


def test_summary_by_hand() -> None:
    steps = [{"step": step, "loss": 0.0, "reward": step / 10, "uniform_groups": 0.5} for step in range(20)]
    lines = table([*steps, {"step": 3, "completion/1": "text"}])
    assert [line.split() for line in lines[1:]] == [
        ["reward", "0.0500", "1.8500"],
        ["uniform_groups", "0.5000", "0.5000"],
    ]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_reward_rises(ranks: int, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": str(warm_python()), "OMP_NUM_THREADS": "1", "RANKS": str(ranks)}
    command = ["bash", str(FOLDER / "run.sh"), str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    lines = (tmp_path / "out" / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rewards = [record["reward"] for record in map(json.loads, lines) if "reward" in record]
    assert mean(rewards[:5]) < 0.7 and mean(rewards[-10:]) > 0.9, rewards
