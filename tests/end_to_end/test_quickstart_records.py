"""The quickstart's text and questions are what they claim to be."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import sentencepiece

from tests.support.commands import REPOSITORY
from tests.support.warm_python import warm_python

MADE_BY = "rankfold.quickstarting."


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    for script, name in (("make_text", "text"), ("make_questions", "data")):
        command = [warm_python(), "-m", MADE_BY + script, "--out", str(folder / name)]
        subprocess.run(command, check=True, timeout=60, cwd=REPOSITORY)
    return folder


def records(made: Path, name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (made / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def test_answers_stand_in_the_reference_word_for_word(made: Path) -> None:
    reference = " ".join(" ".join(topics.values()).split())
    for record in records(made, "train") + records(made, "validation"):
        assert " ".join(record["completion"].split()) in reference


def test_validation_answers_are_not_trained_on(made: Path) -> None:
    training, validation = records(made, "train"), records(made, "validation")
    assert len(training) > 500 and len(validation) > 40
    learnt = [record["completion"] for record in training]
    assert not [record for record in validation if any(record["completion"] in answer for answer in learnt)]
    assert not {record["prompt"] for record in training} & {record["prompt"] for record in validation}


def test_tokenizer_writes_any_text_and_is_the_same_each_time(made: Path, tmp_path: Path) -> None:
    model = made / "text" / "model" / "tokenizer.model"
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=model.read_bytes())
    text = "def f(x):\n        return x ** 2  # né le 3 mai, 東京 🙂"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    config = json.loads((made / "text" / "model" / "config.json").read_text(encoding="utf-8"))
    assert config["vocab_size"] == tokenizer.vocab_size()
    assert (config["bos_token_id"], config["eos_token_id"]) == (tokenizer.bos_id(), tokenizer.eos_id())
    command = [warm_python(), "-m", MADE_BY + "make_text", "--out", str(tmp_path)]
    subprocess.run(command, check=True, timeout=60, cwd=REPOSITORY)
    assert (tmp_path / "model" / "tokenizer.model").read_bytes() == model.read_bytes()
