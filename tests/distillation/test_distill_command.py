"""`rankfold distill` writes the tokens and log-probabilities of transformers, by a model in layouts and by a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from engine.config.command_line import named_as
from engine.errors import UserError
from engine.runtime.launch import Launch
from rankfold.distill import build_parser
from rankfold.distilling import options
from rankfold.distilling.command import distill
from tests.support.completion_stand_in import StandIn
from tests.support.rollout_runs import run_here
from tests.support.spawning import spawn
from tests.support.sweeps import sampled
from tests.support.taught import TEXTS, taught_settings, write_place

TOP = 4
"""Tokens at each target."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distill")
    write_place(folder, vocabulary=16)
    lines = (folder / "taught.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    bare = [{name: record[name] for name in ("input_ids", "labels")} for record in records]
    (folder / "ids.jsonl").write_text("".join(json.dumps(record) + "\n" for record in bare), encoding="utf-8")
    return folder


def check(path: Path, folder: Path) -> None:
    """Each record's tokens are the teacher's most likely ones at its targets."""
    teacher = AutoModelForCausalLM.from_pretrained(folder / "teacher")
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(records) == TEXTS
    for record in records:
        ids, labels = torch.tensor(record["input_ids"]), torch.tensor(record["labels"])
        assert torch.equal(labels[labels != -100], ids[labels != -100]) and labels[0] == -100
        with torch.no_grad():
            logps = teacher(ids[None]).logits[0, :-1].float().log_softmax(-1)[labels[1:] != -100]
        best = logps.topk(TOP)
        assert record["target_token_ids"] == best.indices.tolist()
        torch.testing.assert_close(torch.tensor(record["target_logprobs"]), best.values, rtol=0, atol=2e-5)


def distil(words: list[str]) -> None:
    """The command, on the ranks that call it."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    arguments = build_parser().parse_args(words)
    options.check(arguments)
    distill(arguments, Launch(rank=rank, world_size=world, device=torch.device("cpu")))


def words_of(place: Path, out: Path, *more: object) -> list[str]:
    """Arguments of the command."""
    return [str(one) for one in (place / "ids.jsonl", "--out", out, "--top-k", TOP, "--batch", 3, *more)]


@pytest.mark.distributed
@pytest.mark.parametrize("layout", sampled(["one rank", "tensor", "pipeline"], ["tensor"]))
def test_a_model_writes_its_tokens_and_a_run_learns_them(layout: str, place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    words = words_of(place, out, "--model", place / "teacher", "--pipeline", 1 + (layout == "pipeline"))
    if layout == "one rank":
        distil(words)
        check(out, place)
        run_here(taught_settings(place, data__train=out, checkpoint__dir=tmp_path / "run"))
    else:
        spawn(distil, world=2, args=(words,), timeout=120)
        check(out, place)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_writes_its_tokens(kind: str, place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with StandIn(place / "teacher", kind=kind) as server:
        server_words = ("--server", server.url, "--server-kind", kind, "--slots", 1)  # which asks for 4 texts ahead
        distil(words_of(place, out, *server_words, "--tokenizer", place / "teacher"))
    check(out, place)


def _fewer(answer: dict[str, Any]) -> None:
    entries = answer["choices"][0]["prompt_logprobs"]
    entries[1] = dict(list(entries[1].items())[:1])


def _other_id(answer: dict[str, Any]) -> None:
    answer["choices"][0]["prompt_logprobs"][1]["x"] = {"logprob": -1.0}


def _positive(answer: dict[str, Any]) -> None:
    answer["choices"][0]["prompt_logprobs"][1]["7"] = {"logprob": 0.5}


@pytest.mark.parametrize(
    ("mangle", "words"),
    [(_fewer, "4 were asked for"), (_other_id, "for a token, and an id"), (_positive, "and numbers up to 0")],
)
def test_answers_that_cannot_be_are_refused(mangle: Any, words: str, place: Path, tmp_path: Path) -> None:
    with StandIn(place / "teacher", mangle=mangle, mangles_base=True) as server, pytest.raises(UserError) as refused:
        distil(words_of(place, tmp_path / "out", "--server", server.url, "--tokenizer", place / "teacher"))
    assert words in str(refused.value) and server.url in str(refused.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--server", "http://h"), "--server is given without --tokenizer"),
        (("--server", "http://h", "--tokenizer", "t", "--model", "m"), "--server and --model are given"),
        (("--server", "http://me:word@h", "--tokenizer", "t"), "an address with an @"),
        (("--model", "m", "--top-k", "0"), "--top-k is 0"),
    ],
)
def test_wrong_options(more: tuple[str, ...], words: str, place: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        distil(words_of(place, tmp_path / "out", *more))
    assert words in str(refused.value) and "word@" not in str(refused.value)


def test_more_tokens_than_the_vocabulary_has(place: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--top-k is 40, but the teacher's vocabulary has 16 entries"):
        distil(words_of(place, tmp_path / "out", "--model", place / "teacher", "--top-k", 40))


def test_records_are_not_written_over(place: Path, tmp_path: Path) -> None:
    """A record of another form would be lost."""
    file = tmp_path / "records.jsonl"
    file.write_bytes((place / "ids.jsonl").read_bytes())
    other = tmp_path / "other.jsonl"
    other.symlink_to(file)
    for out in (file, other):
        with pytest.raises(UserError, match="whose records are read: give the name of another file"):
            distil([str(file), "--out", str(out), "--model", str(place / "teacher"), "--top-k", str(TOP)])
    assert file.read_bytes() == (place / "ids.jsonl").read_bytes()


def test_a_server_that_is_not_there_is_named_by_its_flag(place: Path, tmp_path: Path) -> None:
    words = words_of(place, tmp_path / "out", "--server", "http://127.0.0.1:9", "--tokenizer", place / "teacher")
    with pytest.raises(UserError, match="or correct --server"), named_as(build_parser().stands_for):
        distil(words)
