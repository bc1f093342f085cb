"""A run that evaluates a part of its training file."""

from __future__ import annotations

import json

import pytest

from engine.data.order import permutation
from tests.small_runs.conftest import SmallRuns
from tests.support.commands import losses


def _evaluations(run: SmallRuns) -> list[float]:
    lines = (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["eval_loss"] for record in map(json.loads, lines) if "eval_loss" in record]


def test_it_is_a_run_with_two_files(run: SmallRuns, texts: list[dict[str, str]]) -> None:
    run.place.records(*texts)
    common = {"train__steps": 8, "train__eval_every": 4, "train__global_batch_size": 4, "data__seq_length": 48}
    said = run(data__validation_split=0.25, train__seed=3, **common)
    assert "validation data: 3 rows held out of data.train (" in said and "train.seed 3), " in said
    assert " tokens evaluated; 9 rows left to train on" in said
    split, curve = _evaluations(run), losses(run.folder)
    assert "one epoch is 9 rows in 3 steps of 4, the last of 1" in said
    held = set(permutation(3, 2**64 - 1, 12)[:3].tolist())
    other = run.place.folder / "held.jsonl"
    other.write_text("".join(json.dumps(text) + "\n" for index, text in enumerate(texts) if index in held))
    run.place.records(*(text for index, text in enumerate(texts) if index not in held))
    run(data__validation_split=None, data__validation=other, checkpoint__dir=run.folder.with_name("files"))
    assert _evaluations(run) == split and losses(run.folder) == curve


def test_a_resumed_run_holds_the_same_rows_out(run: SmallRuns, texts: list[dict[str, str]]) -> None:
    run.place.records(*texts)
    common = {"train__eval_every": 2, "data__validation_split": 0.25, "data__seq_length": 48}
    run(train__steps=2, **common)
    said = run(train__steps=4)
    assert "data.train differs" not in said and "after step 2" in said
    said = run(train__steps=6, data__validation_split=0.5)
    assert "changed since step_00000004: data.validation_split 0.25 -> 0.5" in said and "data.train differs" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data__validation_split": 1.5}, "data.validation_split is 1.5, but a share above 0 and below 1"),
        ({"data__validation_split": 0.9}, "holds 3 of 3 rows out, which leaves none to train on"),
        ({"data__validation_split": 0.5, "data__validation": "train.jsonl"}, "only one of them can be evaluated"),
    ],
)  # fmt: skip
def test_one_sentence(options: dict[str, object], words: str, run: SmallRuns) -> None:
    assert words in run(status=2, **options)
