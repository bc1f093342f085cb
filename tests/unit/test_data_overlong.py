"""Records that are longer than a row: one policy for every kind of records, and for token stores."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from engine.data.build_store import Request, preprocess
from engine.data.dataset import TokenDataset
from engine.data.stored_rows import stored_dataset
from engine.data.text_reader import build_texts
from engine.data.tokenizer import Tokenizer, load_tokenizer
from engine.errors import UserError
from engine.rollouts.data.prompts import PromptSet, read_prompts
from tests.support.answer_data import build_judged, build_pairs
from tests.support.shared_data import shared

LIMIT = 12
FITS, LONG_ANSWER, LONG_PROMPT = ("Q ", "yes"), ("Q ", "word " * 30), ("word " * 30, "yes")


class Kind(NamedTuple):
    """A kind of records: a record of a prompt and an answer, how records are read, and whether they can be cut."""

    record: Callable[[str, str], dict[str, Any]]
    build: Callable[..., TokenDataset]
    refusal: str
    is_cut: bool = False


def build_stored(path: Path, **options: Any) -> TokenDataset:
    preprocess(Request(files=(path,), tokenizer=shared("tokenizers/minimind")), path.parent / "store")
    return stored_dataset(path.parent / "store", **options)


def completion(prompt: str, answer: str) -> dict[str, Any]:
    return {"prompt": prompt, "completion": answer}


KINDS = {
    "text": Kind(completion, build_texts, "line 3: the record has", is_cut=True),
    "store": Kind(completion, build_stored, "store has a document of", is_cut=True),
    "pairs": Kind(
        lambda prompt, answer: {"prompt": prompt, "chosen": answer, "rejected": "no"},
        build_pairs,
        "line 3: an answer with its question has",
    ),
    "judged": Kind(
        lambda prompt, answer: completion(prompt, answer) | {"label": True},
        build_judged,
        "line 3: the answer with its question has",
    ),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(shared("tokenizers/minimind"))


def write(folder: Path, records: list[dict[str, Any]]) -> Path:
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.mark.parametrize("overlong", ["truncate", "cut", "drop", "error"])
@pytest.mark.parametrize("name", KINDS)
def test_one_policy_for_all_kinds(name: str, overlong: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Two of four records fit, one has a long answer, and one a prompt that leaves none of its answer."""
    kind = KINDS[name]
    path = write(tmp_path, [kind.record(*texts) for texts in (FITS, FITS, LONG_ANSWER, LONG_PROMPT)])
    options = {"tokenizer": tokenizer, "seq_length": LIMIT, "overlong": overlong}
    if overlong == "error":
        ways = "truncate, cut or drop" if kind.is_cut else "truncate or drop"
        advice = rf"more than data\.seq_length {LIMIT}; raise it, or set data\.overlong to {ways}\."
        with pytest.raises(UserError, match=rf"{kind.refusal} \d+ tokens, {advice}"):
            kind.build(path, **options)
        return
    data = kind.build(path, **options)
    report = data.report
    cuts = overlong == "cut" and kind.is_cut
    drops = overlong == "drop"
    assert report.documents == (4 if cuts else 2 if drops else 3)
    assert report.dropped_overlong == (2 if drops else 0)
    assert report.truncated == report.dropped_prompt_only == (0 if cuts or drops else 1)
    assert (report.pieces > 4) == cuts and report.dropped == 4 - report.documents
    for one in (data, *data.companions.values()):
        for row in range(len(one)):
            for tokens, targets in one.documents(row):
                assert len(tokens) <= LIMIT and targets.any(), "a row without an answer is never trained on"


@pytest.mark.parametrize("name", ["text", "pairs", "judged"])
def test_prompts_that_leave_no_answer_leave_nothing(name: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    kind = KINDS[name]
    path = write(tmp_path, [kind.record(*LONG_PROMPT)] * 2)
    with pytest.raises(UserError, match=rf"of 2 \w+ 2 have a prompt that alone fills data\.seq_length {LIMIT}; raise"):
        kind.build(path, tokenizer=tokenizer, seq_length=LIMIT)


@pytest.mark.parametrize("overlong", ["truncate", "cut", "drop"])
def test_long_prompts_are_left_out(overlong: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    found: PromptSet = read_prompts(
        write(tmp_path, [{"prompt": "a"}, {"prompt": "word " * 30}]), tokenizer=tokenizer, room=LIMIT, overlong=overlong
    )
    assert (len(found.prompts), found.num_too_long) == (1, 1)


@pytest.mark.parametrize("name", ["text", "pairs", "judged"])
def test_the_first_of_two_faults_is_named(name: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Records are judged many at a time; a long one comes before one that is no record, and after it."""
    kind = KINDS[name]
    long, broken = kind.record(*LONG_PROMPT), kind.record("Q ", "yes") | {"prompt": 3}
    for records, message in (
        ([kind.record(*FITS), long, broken], rf"line 2: .* \d+ tokens, more than data\.seq_length {LIMIT}"),
        ([kind.record(*FITS), broken, long], "line 2: field 'prompt' is a number, expected a string"),
    ):
        with pytest.raises(UserError, match=message):
            kind.build(write(tmp_path, records), tokenizer=tokenizer, seq_length=LIMIT, overlong="error")


def test_the_first_faulty_prompt_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    long = {"prompt": "word " * 30}
    for broken, fault in (({"prompt": ""}, "has no tokens"), ({"prompt": 3}, "is a number, expected a list of turns")):
        for records, message in (([long, broken], r"line 1: .* \d+ tokens"), ([broken, long], f"line 1: .* {fault}")):
            with pytest.raises(UserError, match=message):
                read_prompts(write(tmp_path, records), tokenizer=tokenizer, room=LIMIT, overlong="error")
