"""What `rankfold evaluate` refuses, in one sentence, and that the process is as before afterwards."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

pytest.importorskip("lm_eval")

from engine.errors import UserError
from engine.runtime.launch import Launch
from rankfold.evaluating.command import evaluate
from rankfold.evaluating.options import build_parser


def run(model: Path, folder: Path, *arguments: object) -> None:
    given = ["--model", model, "--include-path", folder, "--limit", 2, *arguments]
    parsed = build_parser(None).parse_args([*map(str, given)])
    evaluate(parsed, Launch(rank=0, world_size=1, device=torch.device("cpu")))


def changed(tasks: Path, folder: Path, name: str, **changes: Any) -> Path:
    """A folder with one task that is `name` with other settings."""
    task = yaml.safe_load((tasks / f"{name}.yaml").read_text(encoding="utf-8")) | changes
    folder.mkdir(exist_ok=True)
    (folder / "changed.yaml").write_text(yaml.safe_dump(task | {"task": "changed"}), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("tiny_answer", {"unsafe_code": True}, "runs code that the model wrote.*evaluation.allow_code"),
        ("tiny_answer", {"generation_kwargs": {"num_beams": 3, "max_gen_toks": 9}}, "generation with num_beams"),
        ("tiny_answer", {"generation_kwargs": {"max_gen_toks": 96}}, "up to 96 tokens.*context is 96"),
        ("tiny_answer", {"doc_to_text": "{{nothing.at.all}}"}, "its template fails"),
        ("tiny_choice", {"dataset_path": "owner/name", "dataset_kwargs": {}}, "not on this machine.*hub.download"),
        ("tiny_choice", {"output_type": "guessing"}, "evaluation.tasks changed: .*correct the task"),
        ("tiny_last", {"doc_to_target": "{{' a' * 97}}"}, "a continuation.*from 1 to 96"),
    ],
)  # fmt: skip
def test_a_task_that_cannot_be_evaluated(
    model: Path, tasks: Path, tmp_path: Path, name: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        run(model, changed(tasks, tmp_path / "tasks", name, **changes), "--tasks", "changed")


def test_conversations_without_a_template(model: Path, tasks: Path, tmp_path: Path) -> None:
    plain = tmp_path / "model"
    plain.mkdir()
    for file in model.iterdir():
        if file.name != "chat_template.jinja":
            (plain / file.name).symlink_to(file)
    with pytest.raises(UserError, match="the tokenizer has no chat template"):
        run(plain, tasks, "--tasks", "tiny_letters", "--apply-chat-template")


def test_random_numbers_are_left_as_they_were(model: Path, tasks: Path) -> None:
    def state() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = state()
    run(model, tasks, "--tasks", "tiny_choice,tiny_answer")
    assert state() == before


@pytest.mark.slow
def test_a_name_that_is_no_task(model: Path, tasks: Path) -> None:
    with pytest.raises(UserError, match="tiny_chioce, which is no task.*did you mean tiny_choice"):
        run(model, tasks, "--tasks", "tiny_chioce")


def test_options(tmp_path: Path) -> None:
    from rankfold.evaluating.options import task_choice

    for arguments, words in (
        (["--tasks", "a,"], "evaluation.tasks names no task"),
        (["--tasks", "a", "--limit", "1.5"], "evaluation.limit is 1.5"),
        (["--tasks", "a", "--num-fewshot", "-1"], "evaluation.num_fewshot is -1"),
        (["--tasks", "a", "--include-path", str(tmp_path / "none")], "is not a folder"),
    ):
        with pytest.raises(UserError, match=words):
            task_choice(build_parser(None).parse_args(arguments))
