"""`engine.api` as a program uses it, in this process: the lines of docs/python.md, and the same by the command line."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from engine.api import (
    CheckpointEvent,
    EvaluationEvent,
    RunConfig,
    RunListener,
    RunSummary,
    StepEvent,
    UserError,
    export,
    generate,
    load_config,
    train,
)
from engine.config.load import load_config as load_arguments
from tests.support.character_tokenizer import write_character_tokenizer
from tests.support.commands import REPOSITORY, losses
from tests.wrong_inputs.workplace import make_place

PAGE = (REPOSITORY / "docs" / "python.md").read_text("utf-8")
PROMPT = "abab cab"
RUN: dict[str, Any] = {
    "model": {"path": "model"},
    "lora": {"rank": 2, "alpha": 4, "targets": ["q_proj", "v_proj"], "dropout": 0.1},
    "data": {"train": "train.jsonl", "seq_length": 20},
    "optim": {"lr": 1e-2, "warmup_ratio": 0.5},
    "train": {"steps": 6, "global_batch_size": 3},
    "checkpoint": {"dir": "runs/mine"},
    "log": {"metrics": "metrics.jsonl"},
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, data and run.yaml, which is the current one."""
    folder = make_place(tmp_path / "place").folder
    shutil.rmtree(folder / "adapter")
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN))
    monkeypatch.chdir(folder)
    return folder


def _command(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "rankfold", *words],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _records(folder: Path) -> list[dict[str, Any]]:
    """What each step came to, without what depends on the clock."""
    lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    kept = ("step", "loss", "grad_norm", "lr")
    return [{key: record[key] for key in kept} for record in map(json.loads, lines) if "loss" in record]


def test_the_guide(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of the page's program, whose first lines are what the command does."""
    write_character_tokenizer(place / "model", chat_template="{% for m in messages %}{{ m.content }} {% endfor %}")
    first, *others = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len([line for line in first.splitlines() if line.strip()]) == 10
    before = signal.getsignal(signal.SIGTERM)
    capsys.readouterr()
    program: dict[str, Any] = {}
    exec(compile(first, "docs/python.md", "exec"), program)
    printed = capsys.readouterr().out.splitlines()
    assert signal.getsignal(signal.SIGTERM) is before and not dist.is_initialized()

    _command(
        "train", "--config", "run.yaml", "--lora.rank", "8", "--optim.lr", "1e-3", "--checkpoint.dir", "runs/command"
    )
    records = _records(Path("runs/mine"))
    assert len(records) == 6 and records == _records(Path("runs/command"))
    heard = [line for line in printed if line.startswith("step ") and ", loss " in line]
    assert heard == [f"step {record['step']}, loss {record['loss']:.4f}" for record in records]

    answer = _command(
        "generate", "--model", "model", "--adapter", "runs/command", "--prompt", "Once upon a time",
        "--max-new-tokens", "20",
    )  # fmt: skip
    assert answer.splitlines() == printed[-len(answer.splitlines()) :]
    assert _opened_by_peft() > 0
    for block in others:
        exec(compile(block, "docs/python.md", "exec"), program)
    assert program["summary"].stopped == "stop()" and program["run"].steps == 3
    assert (place / "session-adapter" / "adapter_config.json").is_file()


def _opened_by_peft() -> float:
    """How much the adapter changes the model, which must be what it changes in the merged one."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tokens = torch.arange(3, 30)[None]
    base = AutoModelForCausalLM.from_pretrained("model").eval()
    merged = AutoModelForCausalLM.from_pretrained("merged").eval()
    with torch.no_grad():
        plain = base(tokens).logits
        adapted = PeftModel.from_pretrained(base, "adapter").eval()(tokens).logits
        # sums in another order in float32, on logits below 1
        torch.testing.assert_close(adapted, merged(tokens).logits, rtol=0, atol=1e-5)
    return float((adapted - plain).abs().max())


def test_again_and_again_in_one_process(place: Path) -> None:
    class Hears(RunListener):
        def __init__(self) -> None:
            self.losses: list[float] = []

        def reported(self, event: StepEvent) -> None:
            self.losses.append(event.loss)

    heard = []
    for name, deterministic in (("a", True), ("b", False)):
        config = load_config("run.yaml", checkpoint={"dir": f"runs/{name}"}, train={"deterministic": deterministic})
        listener = Hears()
        summary = train(config, listener)
        assert summary.stopped is None and summary.steps == 6 and summary.run_dir == Path(f"runs/{name}")
        assert not torch.are_deterministic_algorithms_enabled() and not dist.is_initialized()
        assert listener.losses == list(losses(summary.run_dir).values())
        heard.append(listener.losses)
        with pytest.raises(UserError, match="train.jsonl line 1: not a JSON record"):
            (place / "damaged").mkdir(exist_ok=True)
            (place / "damaged" / "train.jsonl").write_text("{")
            train(load_config("run.yaml", checkpoint={"dir": "runs/no"}, data={"train": "damaged/train.jsonl"}))
    assert heard[0] == heard[1] and len(heard[0]) == 6
    assert train(load_config("run.yaml", checkpoint={"dir": "runs/a"})).steps == 6, "complete, and says so"


def test_generate_is_the_same_with_run_and_with_merged_model(place: Path) -> None:
    run = train(load_config("run.yaml", optim={"lr": 0.3}, log={"metrics": None})).run_dir
    export(run, "merged", format="hf")
    prompts = [PROMPT, "bac"]
    answers = generate("model", prompts, adapter=run, max_new_tokens=12)
    assert (
        answers
        == generate("merged", prompts, max_new_tokens=12)
        == generate(None, prompts, adapter=run, max_new_tokens=12)
    )
    assert answers != generate("model", prompts, max_new_tokens=12), "the adapter changes nothing"
    drawn = [generate("model", prompts, temperature=1.0, seed=seed, max_new_tokens=12) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert generate("model", []) == []


def test_ways_to_a_configuration(place: Path) -> None:
    written = load_arguments(["--config", "run.yaml"])
    assert load_config("run.yaml") == load_config(place / "run.yaml") == written
    assert load_config(RUN) == load_config(**RUN) == written
    flat = {f"{section}.{name}": value for section, options in RUN.items() for name, value in options.items()}
    assert load_config(flat) == load_config("run.yaml", **flat) == written
    changed = load_config(
        "run.yaml", optim={"lr": 3e-5, "betas": (0.8, 0.9)}, trainable=["lm_head"], train={"steps": 3}
    )
    words = "--optim.lr 3e-5 --optim.betas 0.8,0.9 --trainable lm_head --train.steps 3"
    assert changed == load_arguments(["--config", "run.yaml", *words.split()])
    kinds = load_config(
        RUN, data={"train": place / "train.jsonl", "packing": True}, model={"base_dtype": None},
        lora={"rank_pattern": {"v_proj": 3}}, train={"sample_prompts": ["a, b", "c"], "sample_every": 2},
    )  # fmt: skip
    assert kinds.data.train == str(place / "train.jsonl") and kinds.data.packing is True
    assert kinds.lora.rank_pattern == {"v_proj": 3} and kinds.train.sample_prompts == ("a, b", "c")
    assert kinds.data.seq_length == 20, "a section's other options stay"


class Records(RunListener):
    """Keeps all that it hears, and stops the run after a step.

    Args:
        stop_at: the step; 0 for none.
    """

    def __init__(self, stop_at: int = 0) -> None:
        self._stop_at = stop_at
        self.steps: list[StepEvent] = []
        self.evaluations: list[EvaluationEvent] = []
        self.checkpoints: list[CheckpointEvent] = []

    def reported(self, event: StepEvent) -> None:
        self.steps.append(event)
        if event.step == self._stop_at:
            self.stop()

    def evaluated(self, event: EvaluationEvent) -> None:
        self.evaluations.append(event)

    def saved(self, event: CheckpointEvent) -> None:
        self.checkpoints.append(event)


def test_events_have_the_figures_of_the_metrics_file(place: Path) -> None:
    heard = Records()
    more = {"data": {"validation": "train.jsonl"}, "train": {"eval_every": 3}, "checkpoint": {"every": 4}}
    summary = train(load_config("run.yaml", **more), heard)  # type: ignore[arg-type]
    written = [json.loads(line) for line in (summary.run_dir / "metrics.jsonl").read_text("utf-8").splitlines()]
    steps = [record for record in written if "loss" in record]
    assert len(steps) == 6
    for event, record in zip(heard.steps, steps, strict=True):
        named = asdict(event)
        figures = named.pop("figures")
        assert named.pop("samples") == 3 * event.step
        assert named | figures | {"tokens_per_second": event.tokens_per_second} == record
    evaluations = [record for record in written if "eval_loss" in record]
    assert [(one.step, one.loss, one.seconds) for one in heard.evaluations] == [
        (one["step"], one["eval_loss"], one["seconds"]) for one in evaluations
    ]
    assert [one.path for one in heard.checkpoints] == [
        summary.run_dir / "checkpoints" / f"step_{step:08}" for step in (4, 6)
    ]
    assert all((one.path / "manifest.json").is_file() and one.num_bytes > 0 for one in heard.checkpoints)


def test_stop_from_the_listener_and_in_a_thread(place: Path) -> None:
    """Without signals, whose handlers only the main thread can set; what is stopped resumes to the same end."""
    whole = train(load_config("run.yaml", checkpoint={"dir": "runs/whole"}))
    found: list[RunSummary] = []
    heard = Records(stop_at=2)
    thread = threading.Thread(target=lambda: found.append(train(load_config("run.yaml"), heard)))
    thread.start()
    thread.join()
    (stopped,) = found
    assert stopped.stopped == "stop()" and 2 <= stopped.steps < 6 and not heard.wants_stop
    assert (stopped.run_dir / "checkpoints" / f"step_{stopped.steps:08}").is_dir()
    resumed = train(load_config("run.yaml"), heard)
    assert resumed.stopped is None and resumed.steps == 6
    assert losses(stopped.run_dir) == losses(whole.run_dir)

    early = RunListener()
    early.stop()
    assert train(load_config("run.yaml", checkpoint={"dir": "runs/early"}), early).steps == 0


def test_two_runs_at_a_time_are_refused(place: Path) -> None:
    class TrainsAgain(RunListener):
        def run_started(self) -> None:
            train(load_config("run.yaml", checkpoint={"dir": "runs/other"}))

    with pytest.raises(UserError, match=r"another run of this process trains: wait for it, or stop it"):
        train(load_config("run.yaml"), TrainsAgain())
    assert train(load_config("run.yaml")).steps == 6


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: load_config(RUN, lora={"rnak": 8}), "unknown key lora.rnak: did you mean lora.rank?"),
        (lambda: load_config(RUN, lr=1), "unknown key lr: did you mean optim.lr?"),
        (lambda: load_config(RUN, lora=8), "gives lora the value 8, but lora is a section"),
        (lambda: load_config(RUN, lora={"rank": "many"}), "lora.rank is 'many', but a whole number is expected"),
        (lambda: load_config(RUN, lora={"rank": torch.ones(1)}), "a value of type Tensor"),
        (lambda: load_config("nowhere.yaml"), "nowhere.yaml cannot be read"),
        (lambda: load_config(RUN, model={"path": "nowhere"}), "model.path is nowhere, which is not a folder"),
        (lambda: load_config(), "model.path is not set"),
        (lambda: load_config(RUN, optim={"warmup_steps": 3}), "remove one of the two"),
        (lambda: train(load_config(RUN, parallel={"tensor": 2})), "parallel.tensor"),
        (lambda: export("nowhere", "out"), "nowhere is not a folder"),
        (lambda: export("model", "out"), "is a base model without adapters"),
        (lambda: generate(None, ["a"]), "there is no model: give the folder"),
        (lambda: generate("nowhere", ["a"]), "nowhere"),
        (lambda: generate("model", "a"), "write [prompt]"),
        (lambda: generate("model", ["a"]), "set max_new_tokens to"),
        (lambda: generate("model", ["a"], top_k=3), "but temperature is 0"),
        (lambda: generate("model", [[{"role": "user", "content": "a"}]]), "has no chat template: give a text"),
    ],
)
def test_what_cannot_work_is_one_sentence(place: Path, call: Callable[[], Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        call()
    sentence = str(caught.value)
    assert words in sentence and "\n" not in sentence and sentence.endswith((".", "?")), sentence
    assert not (place / "out").exists()


def test_a_process_group_of_ones_own_is_left_alone(place: Path) -> None:
    config: RunConfig = load_config("run.yaml")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for call in (lambda: train(config), lambda: generate("model", ["a"], max_new_tokens=2)):
            with pytest.raises(UserError, match="has a process group of its own"):
                call()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
