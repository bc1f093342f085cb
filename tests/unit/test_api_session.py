"""A run taken step by step: the bits of `train`, what is done between steps, Ctrl-C, errors, and its end."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.api import (
    CheckpointEvent,
    EvaluationEvent,
    RunConfig,
    RunListener,
    Session,
    StepEvent,
    UserError,
    generate,
    load_config,
    train,
)
from tests.support.rollout_runs import rollout_settings
from tests.wrong_inputs.workplace import RECORDS, make_place

PROMPT = "abab cab"
GIVEN: dict[str, Any] = {"data": RECORDS, "validation": RECORDS[:2]}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = make_place(tmp_path / "place").folder
    shutil.rmtree(folder / "adapter")
    monkeypatch.chdir(folder)
    return folder


def _config(name: str, **train_options: Any) -> RunConfig:
    return load_config(
        model={"path": "model"}, lora={"rank": 2, "targets": ["q_proj", "v_proj"], "dropout": 0.1},
        data={"seq_length": 20}, optim={"lr": 0.1}, checkpoint={"dir": f"runs/{name}"},
        train={"steps": 6, "global_batch_size": 2, "eval_every": 4} | train_options,
    )  # fmt: skip


def _records(run_dir: Path, kept: str) -> list[dict[str, Any]]:
    """The figures of steps, or of evaluations, without those of the clock."""
    named = {"loss": ("step", "loss", "lr", "grad_norm", "tokens"), "eval_loss": ("step", "eval_loss")}[kept]
    lines = (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()
    return [{name: one[name] for name in named} for one in map(json.loads, lines) if kept in one]


def _weights(run_dir: Path, step: int) -> dict[str, bytes]:
    folder = run_dir / "checkpoints" / f"step_{step:08}"
    return {
        path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix in (".bin", ".safetensors")
    }


def test_steps_are_those_of_train(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = train(_config("whole"), **GIVEN)
    saved: list[int] = []

    class Saves(RunListener):
        def saved(self, event: CheckpointEvent) -> None:
            saved.append(event.step)

    with Session(_config("steps"), Saves(), **GIVEN) as run:
        assert (run.steps, run.total_steps, run.summary) == (0, 6, None)
        first = run.step()
        before = run.generate([PROMPT, [3, 4]], max_new_tokens=5)
        assert run.evaluate() == run.evaluate()
        folder = run.save()
        assert folder == run.run_dir / "checkpoints" / "step_00000001" == run.save()
        assert before[0] == generate(None, [PROMPT], adapter=folder, max_new_tokens=5)[0]
        third = run.step(2)
        assert (first.step, third.step, run.steps) == (1, 3, 3)
        assert run.export("adapter") == Path("adapter") and (place / "adapter" / "adapter_config.json").is_file()
        last = run.step(100)
        assert last.step == run.steps == 6, "no more than there are"
        with pytest.raises(UserError, match="the run has ended after step 6 of 6: close the session"):
            run.step()
        assert run.generate([PROMPT], max_new_tokens=5) != []
    assert run.summary is not None and run.summary.stopped is None and run.close() is run.summary
    assert saved == [1, 3, 6], "each once"
    assert _records(run.run_dir, "loss") == _records(expected.run_dir, "loss")
    assert [first.loss, third.loss, last.loss] == [
        _records(expected.run_dir, "loss")[step - 1]["loss"] for step in (1, 3, 6)
    ]
    own = [one for one in _records(run.run_dir, "eval_loss") if one["step"] in (0, 4, 6)]
    assert own == _records(expected.run_dir, "eval_loss") and len(own) == 3
    assert _weights(run.run_dir, 6) == _weights(expected.run_dir, 6) != {}
    with pytest.raises(UserError, match=r"this session was closed by close\(\): open a new one"):
        run.step()
    with pytest.raises(UserError, match="this run is complete"):
        Session(_config("steps"), **GIVEN)


def test_closed_before_its_end_it_resumes(place: Path) -> None:
    whole = train(_config("whole", deterministic=True), **GIVEN)
    assert not torch.are_deterministic_algorithms_enabled()
    modes: list[bool] = []

    class Modes(RunListener):
        def reported(self, event: StepEvent) -> None:
            modes.append(torch.are_deterministic_algorithms_enabled())

    run = Session(_config("parts", deterministic=True), Modes(), **GIVEN)
    other = Session(_config("other"), Modes(), **GIVEN)  # beside it
    run.step(2)
    time.sleep(1)
    assert other.step().seconds < 1, "what is between two steps is of none"
    assert modes == [True, True, False]
    assert run.close().stopped == "Session.close()" and other.close().steps == 1
    with pytest.raises(ZeroDivisionError), Session(_config("parts", deterministic=True), **GIVEN) as run:
        assert run.steps == 2
        run.step()
        _ = 1 / 0
    assert (run.run_dir / "checkpoints" / "step_00000003").is_dir(), "an error of the program loses nothing"
    with Session(_config("parts", deterministic=True), **GIVEN) as run:
        run.step(3)
    assert _records(run.run_dir, "loss") == _records(whole.run_dir, "loss")
    assert not torch.are_deterministic_algorithms_enabled()


def test_steps_on_completions(tmp_path: Path) -> None:
    settings = rollout_settings(tmp_path, train__steps=4, rollout__steps_per_generation=2)
    for name in ("rollout.rewards", "rollout.reward_weights", "data.packing"):
        del settings[name]

    def ones(completions: list[str]) -> list[float]:
        return [one.count("1") / 6 for one in completions]

    found = []
    for name in ("whole", "steps"):
        config = load_config(settings, data={"packing": True}, checkpoint={"dir": str(tmp_path / name)})
        if name == "whole":
            found.append(_records(train(config, rewards=[ones]).run_dir, "loss"))
            continue
        with Session(config, rewards=[ones]) as run:
            assert run.step().figures["reward"] >= 0
            run.save()
        with Session(config, rewards=[ones]) as run:
            run.step(3)
        found.append(_records(run.run_dir, "loss"))
    assert found[0] == found[1]

    rare = load_config(
        settings, data={"packing": True}, checkpoint={"dir": str(tmp_path / "rare"), "every": 1}, log={"every": 3}
    )
    with Session(rare, rewards=[ones]) as run:
        assert [run.step().step, run.step(2).step, run.step().step] == [1, 3, 4], "whatever is reported and saved"


class Presses(RunListener):
    """Presses Ctrl-C in steps, and in evaluations that were asked for."""

    def __init__(self, at: int) -> None:
        self._at = at

    def reported(self, event: StepEvent) -> None:
        if event.step == self._at:
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_finishes_the_step(place: Path) -> None:
    whole = train(_config("whole"), **GIVEN)
    before = signal.getsignal(signal.SIGINT)
    with Session(_config("pressed"), Presses(at=2), **GIVEN) as run:
        with pytest.raises(KeyboardInterrupt, match=r"after step 3 of 6; the session is still open") as caught:
            run.step(6)  # a step is reported while the next one is computed
        frames = [entry.path.name for entry in caught.traceback if isinstance(entry.path, Path)]
        assert frames[-1] == "interrupts.py" and len(frames) == 2, "no frames of training"
        assert signal.getsignal(signal.SIGINT) is before and run.steps == 3
        run.step(3)
    assert _records(run.run_dir, "loss") == _records(whole.run_dir, "loss")


def test_ctrl_c_twice_ends_it_at_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Session(_config("twice"), **GIVEN)
    run.step()
    run.save()

    def press(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(run._present, "take", press)
    with pytest.raises(KeyboardInterrupt, match="the step under way is lost"):
        run.step()
    for call in (run.step, run.evaluate, run.save, run.close):
        with pytest.raises(UserError, match=r"closed by an error after step 1 .KeyboardInterrupt: the step under way"):
            call()
    with Session(_config("twice"), **GIVEN) as run:
        assert run.steps == 1, "the folder is free again"


def test_an_evaluation_is_left(place: Path) -> None:
    class Heard(RunListener):
        evaluations = 0

        def evaluated(self, event: EvaluationEvent) -> None:
            self.evaluations += 1

    heard = Heard()
    with Session(_config("left"), heard, **GIVEN) as run:
        run.step()
        evaluate = run._run.evaluations.run

        def pressed(step: int, consumed: int, check: Any) -> EvaluationEvent:
            signal.raise_signal(signal.SIGINT)
            return evaluate(step, consumed, check)

        run._run.evaluations.run = pressed  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt, match="the session is still open"):
            run.evaluate()
        assert heard.evaluations == 1, "that before the first step"
        run._run.evaluations.run = evaluate  # type: ignore[method-assign]
        assert run.evaluate().step == 1 and run.step().step == 2


def test_stop_ends_the_run(place: Path) -> None:
    listener = RunListener()
    with Session(_config("stopped"), listener, **GIVEN) as run:
        run.step()
        listener.stop()
        assert run.step(5).step == 1
        assert run.summary is not None and run.summary.stopped == "stop()"
        with pytest.raises(UserError, match=r"the run has ended after step 1 of 6, stop\(\)"):
            run.step()
    assert not listener.wants_stop and (run.run_dir / "checkpoints" / "step_00000001").is_dir()


def test_refusals_leave_it_usable(place: Path) -> None:
    config = _config("refused", eval_every=0)
    with Session(config, data=RECORDS) as run:
        calls: list[tuple[Any, str]] = [
            (lambda: run.step(0), "count is 0"),
            (run.evaluate, "there is no validation data to evaluate"),
            (lambda: run.generate(PROMPT), "write .prompt."),
            (lambda: run.generate([[99]]), "prompt 1 has 1 tokens .*of the model's 48"),
            (lambda: run.generate([PROMPT], max_new_tokens=99), "its context is 64"),
            (lambda: run.export("model"), "model"),
        ]
        for call, words in calls:
            with pytest.raises(UserError, match=words):
                call()
        assert run.step().step == 1
        with pytest.raises(UserError, match="runs/refused"):
            Session(config, data=RECORDS)
    with pytest.raises(UserError, match="data has no records"):
        Session(_config("none", eval_every=0), data=[])
