"""`rankfold train` with a list of runs over one base: each ends as it does alone."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from transformers import AutoConfig, LlamaForCausalLM

from engine.api import load_config
from engine.checkpoint.run.step_folders import checkpoint_folder
from engine.checkpoint.run.training_state import TrainingCheckpoint
from engine.config.load import has_adapters, parse_config
from engine.config.run import RunConfig
from engine.errors import UserError
from engine.tenants.sweep import train_sweep
from engine.tenants.sweep_file import read_sweep
from engine.tenants.tenants import Tenants
from engine.training.evaluations import Evaluations
from engine.training.trainer import train
from rankfold.benchmarking.small_run import SMALL_LLAMA, write_small_run
from tests.support.commands import REPOSITORY, losses, options, run_tool
from tests.support.rollout_runs import records, rollout_settings, run_here
from tests.support.sweeps import sampled
from tests.tenants.test_shared_base import SMALLER

SIZES = {**SMALL_LLAMA, **SMALLER, "vocab_size": 1024}
ENTRIES: dict[str, dict[str, Any]] = {
    "narrow": {"lora": {"rank": 2, "alpha": 4}, "train": {"seed": 3, "steps": 6}},
    "wide": {
        "lora": {"rank": 8, "targets": ["q_proj", "down_proj"], "dropout": 0.1},
        "train": {"seed": 11, "steps": 4, "eval_every": 2},
        "optim": {"lr": 2e-3, "schedule": "linear"},
    },
    "head": {
        "lora": {"rank": 3, "targets": ["all-linear", "lm_head"]},
        "data": {"seq_length": 32},
        "train": {"steps": 5, "global_batch_size": 4},
    },
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    write_small_run(folder / "model", SIZES)
    torch.manual_seed(0)
    LlamaForCausalLM(AutoConfig.from_pretrained(folder / "model", initializer_range=0.2)).save_pretrained(
        folder / "model"
    )
    return folder


def _top(place: Path, runs: Path) -> dict[str, Any]:
    data = str(place / "model" / "train.jsonl")
    return {
        "model": {"path": str(place / "model")},
        "data": {"train": data, "validation": data, "format": "text", "seq_length": 48, "packing": True},
        "optim": {"lr": 1e-3},
        "train": {"micro_batch_size": 1, "global_batch_size": 2, "eval_samples": 4},
        "checkpoint": {"dir": str(runs), "every": 2, "keep": 0},
        "log": {"peak_tflops": 0},
    }


def _file(place: Path, runs: Path, names: Mapping[str, Any] | list[str], **top: Any) -> list[str]:
    runs.mkdir(parents=True, exist_ok=True)
    path = runs / "sweep.yaml"
    listed = [{"name": name, **ENTRIES[name]} for name in names]
    path.write_text(yaml.safe_dump({**_top(place, runs), **top, "adapters": listed}))
    return ["--config", str(path)]


def _alone(place: Path, runs: Path, name: str) -> RunConfig:
    found = _top(place, runs)
    for section, own in ENTRIES[name].items():
        found[section] = {**found.get(section, {}), **own}
    found["checkpoint"]["dir"] = str(runs / name)
    return load_config(found)


def _state(run: Path, step: int) -> dict[str, Tensor]:
    checkpoint = TrainingCheckpoint(checkpoint_folder(run, step))
    return {name: checkpoint.read_whole(name) for name in checkpoint.tensor_names()}


def _records(run: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    kept = ("step", "loss", "grad_norm", "lr", "eval_loss", "tokens")
    found = [{key: one[key] for key in kept if key in one} for one in lines]
    return [one for one in found if len(one) > 1]


def _same(found: Path, expected: Path, step: int) -> None:
    assert _records(found) == _records(expected)
    ours, theirs = _state(found, step), _state(expected, step)
    assert ours.keys() == theirs.keys() and any(name.startswith("optim.exp_avg_sq/") for name in ours)
    assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]


@pytest.fixture(scope="module")
def together(place: Path) -> Path:
    """All three runs at once."""
    runs = place / "together"
    train_sweep(_file(place, runs, ENTRIES))
    return runs


@pytest.mark.parametrize("name", sampled(ENTRIES, ["wide"]))
def test_each_run_ends_as_alone(place: Path, together: Path, name: str) -> None:
    runs = place / "alone"
    train_sweep(_file(place, runs, [name]))
    steps = ENTRIES[name]["train"]["steps"]
    _same(together / name, runs / name, steps)
    assert list(losses(together / name)) == [*range(1, steps + 1)]


@pytest.mark.parametrize("name", sampled(ENTRIES, ["head"]))
def test_a_plain_run_differs_by_rounding_alone(place: Path, together: Path, name: str) -> None:
    """Its products add up in another order."""
    train(_alone(place, place / "plain", name))
    found, expected = _records(together / name), _records(place / "plain" / name)
    assert [one.keys() for one in found] == [one.keys() for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    step = ENTRIES[name]["train"]["steps"]
    ours, theirs = _state(together / name, step), _state(place / "plain" / name, step)
    assert ours.keys() == theirs.keys()
    for tensor in [tensor for tensor in ours if not tensor.startswith("optim.")]:
        torch.testing.assert_close(ours[tensor], theirs[tensor], rtol=0, atol=2e-5, msg=tensor)


def test_runs_that_ended_in_the_middle_go_on(
    place: Path, together: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of the three is at its end by then; of the others all since their last checkpoint is lost."""
    taken = 0
    update = Tenants.update

    def fail(self: Tenants, number: int, lr: float, loss: Tensor) -> Tensor:
        nonlocal taken
        taken += 1
        if taken == 14:  # the second run of the fifth round, of whose entries one has ended
            raise RuntimeError("the power fails")
        return update(self, number, lr, loss)

    with monkeypatch.context() as patched:
        patched.setattr(Tenants, "update", fail)
        with pytest.raises(RuntimeError, match="the power fails"):
            train_sweep(_file(place, tmp_path, ENTRIES))
    assert not checkpoint_folder(tmp_path / "narrow", 6).exists()
    train_sweep(_file(place, tmp_path, ENTRIES))
    said = capsys.readouterr().err
    assert "wide: this run is complete (step 4 of 4)" in said and "narrow: resuming from" in said
    for name, step in (("narrow", 6), ("wide", 4), ("head", 5)):
        _same(tmp_path / name, together / name, step)


@pytest.mark.slow
def test_a_run_that_cannot_go_on_ends_alone(
    place: Path, together: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = Evaluations.run

    def fail(self: Evaluations, step: int, check: Any) -> float:
        if self._options.seed == 11 and step == 2:
            raise UserError("the evaluation cannot be computed.")
        return evaluate(self, step, check)

    monkeypatch.setattr(Evaluations, "run", fail)
    with pytest.raises(UserError, match=r"1 run of 3 could not go on \(wide\)"):
        train_sweep(_file(place, tmp_path, ENTRIES))
    for name, step in (("narrow", 6), ("head", 5)):
        _same(tmp_path / name, together / name, step)


@pytest.mark.slow
def test_a_signal_stops_all_runs(place: Path, together: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update = Tenants.update
    taken = 0

    def signalled(self: Tenants, number: int, lr: float, loss: Tensor) -> Tensor:
        nonlocal taken
        taken += 1
        if taken == 8:  # within the third round
            signal.raise_signal(signal.SIGTERM)
            time.sleep(0.3)  # for the thread that reads signals
        return update(self, number, lr, loss)

    with monkeypatch.context() as patched:
        patched.setattr(Tenants, "update", signalled)
        summary = train_sweep(_file(place, tmp_path, ENTRIES))
    assert summary.stopped is not None and "SIGTERM" in summary.stopped
    steps = {"narrow": 4, "wide": 3, "head": 3}  # the first had its next step already
    assert all(checkpoint_folder(tmp_path / name, step).exists() for name, step in steps.items())
    assert train_sweep(_file(place, tmp_path, ENTRIES)).stopped is None
    for name, step in (("narrow", 6), ("wide", 4), ("head", 5)):
        _same(tmp_path / name, together / name, step)


@pytest.mark.parametrize(
    ("entry", "top", "sentence"),
    [
        ({"model": {"dtype": "bfloat16"}}, {}, "entry narrow of adapters, has the section model"),
        ({"memory": {"recompute": "all"}}, {}, "entry narrow of adapters, has the section memory"),
        ({"trainable": ["norm"]}, {}, "entry narrow of adapters, has trainable"),
        ({"lora": {"rnk": 3}}, {}, "entry narrow of adapters, has the unknown key lora.rnk: did you mean lora.rank?"),
        ({"lora": {"rank": "two"}}, {}, "entry narrow of adapters, cannot run: lora.rank is 'two'"),
        ({"lora": {"rank": 0}}, {}, "entry narrow of adapters, cannot run: lora.rank is 0"),
        ({"train": {"deterministic": True}}, {}, "entry narrow of adapters, has train.deterministic True"),
        ({"log": {"profile_steps": [2]}}, {}, "entry narrow of adapters, has log.profile_steps"),
        ({"checkpoint": {"dir": "{runs}/wide"}}, {}, "entries wide and narrow of adapters with one checkpoint.dir"),
        ({"name": "wide"}, {}, "several entries of adapters with the name wide"),
        ({"name": "../up"}, {}, "entry 2 of adapters, has the name '../up'"),
        ({}, {"checkpoint": {}}, "entry wide of adapters, has no checkpoint.dir"),
        ({}, {"joined_tokens": "many"}, "has joined_tokens, but a number of tokens is expected"),
        ({}, {"model": {"path": "{model}", "init": "random"}}, "entry narrow of adapters, has train.seed 3"),
        ({}, {"memory": {"cuda_graph": "layer"}}, "memory.cuda_graph is set, but several runs share one base"),
        ({}, {"parallel": {"tensor": 2}}, "run wide: "),
    ],
)
def test_what_entries_cannot_have_is_refused(
    place: Path, tmp_path: Path, entry: dict[str, Any], top: dict[str, Any], sentence: str
) -> None:
    text = json.dumps({**_top(place, tmp_path), **top, "adapters": [
        {"name": "wide", **ENTRIES["wide"]}, {"name": "narrow", **ENTRIES["narrow"], **entry},
    ]})  # fmt: skip
    path = tmp_path / "sweep.yaml"
    path.write_text(text.replace("{runs}", str(tmp_path)).replace("{model}", str(place / "model")))
    with pytest.raises(UserError) as refusal:
        train_sweep(["--config", str(path)])
    assert sentence in str(refusal.value)
    assert not list(tmp_path.glob("*/checkpoints"))


def test_other_commands_name_the_one_that_takes_such_a_file(place: Path, tmp_path: Path) -> None:
    words = _file(place, tmp_path, ENTRIES)
    assert has_adapters(words) and not has_adapters(["--config", str(place / "model" / "run.yaml")])
    with pytest.raises(UserError, match="has adapters, which is for several runs over one base"):
        parse_config(words)


def test_options_of_the_command_line_are_those_of_every_run(place: Path, tmp_path: Path) -> None:
    sweep = read_sweep([*_file(place, tmp_path, ENTRIES), "--train.steps=1", "--checkpoint.dir", str(tmp_path / "to")])
    assert [(entry.config.train.steps, entry.config.checkpoint.dir) for entry in sweep.entries] == [
        (1, str(tmp_path / "to" / name)) for name in ENTRIES
    ]
    assert [entry.config.lora.rank for entry in sweep.entries] == [2, 8, 3]


def test_the_example_trains(place: Path, tmp_path: Path) -> None:
    data = place / "model" / "train.jsonl"
    own = {
        "model.path": place / "model", "model.dtype": "float32", "data.train": data, "data.validation": data,
        "data.format": "text", "data.seq_length": 64, "train.steps": 2, "train.global_batch_size": 2,
        "train.eval_every": 0, "train.eval_samples": 2, "optim.warmup_steps": 0,
        "checkpoint.dir": tmp_path, "log.peak_tflops": 0,
    }  # fmt: skip
    train_sweep(["--config", str(REPOSITORY / "examples" / "adapter_sweep" / "sweep.yaml"), *options(own)])
    assert sorted(path.parent.name for path in tmp_path.glob("*/checkpoints")) == [
        "attention-only", "r64", "r8", "r8-short",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("layout", [{"tensor": 2}, {"pipeline": 2}, {}], ids=["tensor", "pipeline", "data"])
def test_two_ranks(place: Path, together: Path, tmp_path: Path, layout: dict[str, int]) -> None:
    """Their sums are in another order."""
    words = _file(place, tmp_path, ENTRIES, parallel=layout)
    run_tool("pretrain_lora", *words, ranks=2)
    for name in ENTRIES:
        assert losses(tmp_path / name) == pytest.approx(losses(together / name), abs=1e-5)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_killed_process_goes_on(place: Path, together: Path, tmp_path: Path) -> None:
    words = _file(place, tmp_path, ENTRIES)
    process = subprocess.Popen([sys.executable, "-m", "rankfold", "train", *words], cwd=REPOSITORY)
    ends = time.monotonic() + 100
    while not checkpoint_folder(tmp_path / "wide", 2).exists():
        assert process.poll() is None and time.monotonic() < ends
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    run_tool("pretrain_lora", *words)
    for name, step in (("narrow", 6), ("wide", 4), ("head", 5)):
        _same(tmp_path / name, together / name, step)


@pytest.mark.slow
def test_runs_that_sample_what_they_train_on(tmp_path: Path) -> None:
    settings = rollout_settings(tmp_path, train__steps=2, checkpoint__dir=tmp_path / "runs")
    del settings["lora.rank"]
    ranks = {"a": 4, "b": 2}
    listed = [{"name": name, "lora": {"rank": rank}} for name, rank in ranks.items()]
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump({"adapters": listed}))
    train_sweep(["--config", str(tmp_path / "sweep.yaml"), *options(settings)])
    for name, rank in ranks.items():
        run_here({**settings, "lora.rank": rank, "checkpoint.dir": tmp_path / "alone" / name})
        for one, other in zip(records(tmp_path / "runs" / name), records(tmp_path / "alone" / name), strict=True):
            figures = ("step", "loss", "reward", "entropy", "completions/mean_length", "completions/max_length")
            assert [one[key] for key in figures] == pytest.approx([other[key] for key in figures], abs=1e-4)
