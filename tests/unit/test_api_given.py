"""Records and functions that a program gives to `train`: the run of the same in files, resumed, and what is refused."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.api import RunConfig, UserError, load_config, train
from engine.rollouts.rewards.program_functions import ProgramFunction
from engine.rollouts.user_process import CallFailed
from tests.support.commands import losses
from tests.support.rollout_runs import rollout_settings
from tests.wrong_inputs.workplace import RECORDS, make_place

RUN: dict[str, Any] = {
    "model": {"path": "model"},
    "lora": {"rank": 2, "alpha": 4, "targets": ["q_proj", "v_proj"], "dropout": 0.1},
    "data": {"seq_length": 20},
    "optim": {"lr": 1e-2},
    "train": {"steps": 4, "global_batch_size": 2, "eval_every": 2},
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = make_place(tmp_path / "place").folder
    shutil.rmtree(folder / "adapter")
    monkeypatch.chdir(folder)
    return folder


def _config(name: str, **options: Any) -> RunConfig:
    return load_config(RUN, checkpoint={"dir": f"runs/{name}"}, **options)


def _printed(capsys: pytest.CaptureFixture[str]) -> str:
    return "".join(capsys.readouterr())


def _evaluations(name: str) -> list[float]:
    lines = Path(f"runs/{name}/metrics.jsonl").read_text("utf-8").splitlines()
    return [record["eval_loss"] for record in map(json.loads, lines) if "eval_loss" in record]


def test_the_run_of_the_same_records_in_files(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = [{"text": "cc bb aa"}]
    Path("more.jsonl").write_text(json.dumps(more[0]), encoding="utf-8")
    Path("train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in RECORDS), encoding="utf-8")
    files = {"train": "train.jsonl", "mix": ["more.jsonl=0.5"], "validation": "more.jsonl"}
    train(_config("files", data=files))
    train(
        _config("given", data={"train": "more.jsonl"}),
        data=iter(RECORDS),
        mix=[(lambda: iter(more), 0.5)],
        validation=more,
    )
    assert losses(Path("runs/given")) == losses(Path("runs/files")) and len(losses(Path("runs/given"))) == 4
    assert _evaluations("given") == _evaluations("files") and len(_evaluations("given")) == 3

    longer = _config("given", train={"steps": 6})
    with pytest.raises(UserError, match=r"data\.train is not set"):
        train(longer, validation=more)
    capsys.readouterr()
    train(longer, data=[*RECORDS[1:], RECORDS[0]], mix=[("more.jsonl", 0.5)], validation="more.jsonl")
    assert "data.train differs from the data that" in _printed(capsys)
    train(_config("files", data=files, train={"steps": 6}))
    assert losses(Path("runs/given")) != losses(Path("runs/files")), "in another order"

    saved = next(Path("runs/given").glob("**/run_config.yaml"), None) or next(Path("runs/given").glob("**/*.yaml"))
    with pytest.raises(UserError, match=r"data.train is python:data, records of a Python program: give them in that"):
        load_config(saved, checkpoint={"resume": "auto"})


def test_python_rewards_score_as_those_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = rollout_settings(tmp_path, train__steps=2)
    for name in ("rollout.rewards", "rollout.reward_weights", "data.packing"):
        del settings[name]
    prompts = [json.loads(line) for line in Path(str(settings.pop("data.train"))).read_text("utf-8").splitlines()]
    options = {"data.packing": True} | settings
    seen: list[int] = []

    def ones(completions: list[str], **columns: Any) -> list[float]:
        seen.append(len(completions))
        columns.clear()
        return [completions.pop(0).count("1") / 6 for _ in range(len(completions))]

    async def long(completion_ids: list[list[int]], answer: list[str]) -> list[float]:
        return [0.01 * len(ids) + 0.001 * int(right) for ids, right in zip(completion_ids, answer, strict=True)]

    found = []
    file = f"{tmp_path}/rewards.py"
    rewards: list[Any] = [[ones, (long, 0.5)], [f"{file}:ones", (f"{file}:long", 0.5)]]
    for number, own in enumerate(rewards):
        config = load_config(options, checkpoint={"dir": str(tmp_path / f"run{number}")})
        summary = train(config, data=prompts, rewards=own)
        lines = (summary.run_dir / "metrics.jsonl").read_text("utf-8").splitlines()
        kept = ("loss", "reward", "rewards/ones/mean", "rewards/long/std", "grad_norm")
        found.append([{name: one[name] for name in kept} for one in map(json.loads, lines) if "loss" in one])
    assert found[0] == found[1] and len(found[0]) == 2 and found[0][0]["reward"] > 0
    assert seen == [32, 32], "called once for each generation batch"

    def broken(completions: list[str]) -> list[float]:
        if len(completions) > 1:
            raise RuntimeError("too many")
        return [1.0] if "1" in completions[0] else [float("nan")]

    capsys.readouterr()
    train(load_config(options, checkpoint={"dir": str(tmp_path / "broken")}, ),
          data=prompts, rewards=[broken])  # fmt: skip
    assert "broken gave no reward for a completion of data record" in _printed(capsys)


def _wants_more(completions: list[str], gold: list[str]) -> list[float]:
    return [0.0 for _ in completions]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"data": 3}, "data is of type int, but records are expected"),
        ({"data": "nowhere.jsonl", "validation": RECORDS}, "data.train is nowhere.jsonl, which is not a file"),
        ({"data": [], "validation": RECORDS}, "data has no records; give some."),
        ({"data": RECORDS, "mix": [RECORDS]}, "mix is no list of pairs of records and a weight"),
        ({"data": RECORDS, "mix": [(RECORDS, 0.0)]}, "a weight from 1e-6 to 1e6 is expected"),
        ({"data": RECORDS}, "train.eval_every is 2 and data.validation is not set"),
        ({"data": RECORDS, "validation": RECORDS, "rewards": len}, "rewards is of type builtin_function_or_method"),
        ({"data": RECORDS, "validation": RECORDS, "rewards": [3]}, "rewards[0] is of type int, but a function"),
        ({"data": [{"text": "a", "x": object()}], "validation": RECORDS}, "data record 0: field 'x' is of type object"),
    ],
)
def test_what_cannot_be_given(place: Path, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        train(_config("no"), **arguments)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_rewards_that_cannot_be_called(tmp_path: Path) -> None:
    settings = rollout_settings(tmp_path)
    del settings["rollout.rewards"], settings["rollout.reward_weights"], settings["data.packing"]
    config = load_config(settings, data={"packing": True})
    with pytest.raises(
        UserError, match="the reward function _wants_more cannot be called .it wants gold, but is given"
    ):
        train(config, rewards=[_wants_more])
    with pytest.raises(UserError, match=r"rollout.rewards is \[\], so that no completion is better"):
        train(config)


def test_an_error_in_a_generator_is_the_programs_own(place: Path) -> None:
    def records() -> Iterator[dict[str, str]]:
        yield {"text": "abab"}
        raise LookupError("of the program")

    with pytest.raises(LookupError, match="of the program"):
        train(_config("no"), data=records, validation=RECORDS)
    assert train(_config("yes"), data=RECORDS, validation=RECORDS).steps == 4, "the process can go on"


def test_a_reward_may_change_what_it_is_given_or_hang() -> None:
    request = {
        "prompts": [[{"role": "user"}]],
        "completions": ["a"],
        "completion_ids": [[1]],
        "columns": {"x": [["b"]]},
    }
    before = json.dumps(request)
    released = threading.Event()

    def changes(prompts: list[Any], completions: list[str], x: list[list[str]]) -> list[float]:
        prompts[0].clear()
        return [float(len(x[0].pop()))]

    def hangs(completions: list[str]) -> list[float]:
        released.wait(30)
        return [1.0]

    assert ProgramFunction(changes, ["x"], 30).call(request) == [1.0] and json.dumps(request) == before
    function = ProgramFunction(hangs, ["x"], 0.05)
    with pytest.raises(CallFailed, match="did not come to an end within 0.05 s") as failed:
        function.call(request)
    assert failed.value.hung and function.call_seconds >= 0.05
    released.set()
