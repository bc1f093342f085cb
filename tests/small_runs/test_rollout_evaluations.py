"""Evaluations of runs on rollouts: figures from what reward functions were given, and the run is as without."""

from __future__ import annotations

import json
import math
import shutil
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from engine.api import export, train
from engine.config.load import load_config
from engine.telemetry.listener import EvaluationEvent, RunListener
from rankfold.reporting.page import page
from rankfold.reporting.reading import read_runs
from tests.support.commands import options
from tests.support.completion_stand_in import StandIn
from tests.support.rollout_runs import final_state, records, rollout_settings, run_here
from tests.support.served_runs import served_settings
from tests.support.tool_runs import tool_settings

NOTING = """
import json

def ones(completions, prompts, answer, **columns):
    found = [completion.count("1") / 6 for completion in completions]
    with open(__file__ + ".jsonl", "a") as file:
        for row in zip(prompts, completions, answer, found):
            file.write(json.dumps(row) + "\\n")
    return found

def half(completions, **columns):
    return [None if place % 2 else 0.5 for place in range(len(completions))]

def gone(completions, answer, **columns):
    if answer[0].startswith("held"):
        raise OSError("gone")
    return [float(len(completion)) for completion in completions]
"""
HELD, MEMBERS = 5, 3


def evaluating(folder: Path, **changes: object) -> dict[str, object]:
    """Held-out prompts are some of those that are trained on, with another answer; buffers are of two steps, in the
    middle of which evaluations lie."""
    settings = rollout_settings(folder)
    settings |= {
        "data.validation": folder / "held.jsonl", "train.eval_every": 1, "rollout.eval_generations": MEMBERS,
        "rollout.pass_reward": 0.2, "rollout.steps_per_generation": 2, "rollout.rewards": f"{folder}/noting.py:ones",
        "rollout.reward_weights": "1", "rollout.eval_temperature": 0.8,
    }  # fmt: skip
    settings |= {name.replace("__", "."): value for name, value in changes.items()}
    (folder / "noting.py").write_text(NOTING, encoding="utf-8")
    prompts = [json.loads(line) for line in (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    lines = [json.dumps(one | {"answer": f"held {place}"}) for place, one in enumerate(prompts[:HELD])]
    (folder / "held.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return settings


def without(settings: dict[str, object], folder: Path) -> dict[str, object]:
    evaluation = ("data.validation", "train.eval", "rollout.eval", "rollout.pass", "checkpoint.keep_best")
    kept = {name: value for name, value in settings.items() if not name.startswith(evaluation)}
    return kept | {"checkpoint.dir": folder}


def evaluations(folder: Path) -> dict[int, dict[str, Any]]:
    """The figures of a run's evaluations, by step."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        one["step"]: {name: value for name, value in one.items() if name.startswith("eval/")}
        for one in found
        if "eval_seconds" in one
    }


def same_training(one: Path, other: Path, step: int) -> None:
    losses = [[record["loss"] for record in records(folder)] for folder in (one, other)]
    assert losses[0] == losses[1]
    found, expected = final_state(one, step), final_state(other, step)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_figures_are_those_of_what_functions_were_given(tmp_path: Path) -> None:
    settings = evaluating(tmp_path)
    run_here(settings)
    found = evaluations(tmp_path / "run")
    assert [*found] == [0, 1, 2, 3, 4]
    rows = [json.loads(line) for line in (tmp_path / "noting.py.jsonl").read_text(encoding="utf-8").splitlines()]
    held = [row for row in rows if row[2].startswith("held")]
    assert len(held) == 5 * HELD * MEMBERS
    for step, figures in found.items():
        own = held[step * HELD * MEMBERS : (step + 1) * HELD * MEMBERS]
        assert [row[2] for row in own] == [f"held {place}" for place in range(HELD) for _ in range(MEMBERS)]
        assert figures["eval/reward"] == pytest.approx(mean(row[3] for row in own))
        assert figures["eval/rewards/ones/mean"] == pytest.approx(mean(row[3] for row in own))
        passed = [[row[3] >= 0.2 for row in own[first : first + MEMBERS]] for first in range(0, len(own), MEMBERS)]
        for k in (1, 2, 3):
            expected = mean(mean(map(any, combinations(prompt, k))) for prompt in passed)
            assert figures[f"eval/pass@{k}"] == pytest.approx(expected), (step, k)
        lengths = [figures[f"eval/completions/{name}_length"] for name in ("min", "mean", "max")]
        assert lengths == sorted(lengths) and 0 <= figures["eval/completions/clipped_ratio"] <= 1
    assert len({tuple(row[1] for row in held[first::15]) for first in range(15)}) > 1, "samples differ"
    run_here(without(settings, tmp_path / "plain"))
    same_training(tmp_path / "run", tmp_path / "plain", 4)
    assert "eval/pass@2" in page(read_runs([tmp_path / "run"]))


@pytest.mark.slow
def test_a_killed_run_evaluates_the_same(tmp_path: Path) -> None:
    settings = evaluating(tmp_path, checkpoint__every=1, checkpoint__keep=0)
    run_here(settings)
    whole = evaluations(tmp_path / "run")
    for step in (2, 3, 4):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_{step:08d}")
    run_here(settings)
    assert evaluations(tmp_path / "run") == whole and len(whole) == 5


class Heard(RunListener):
    def __init__(self) -> None:
        self.found: list[EvaluationEvent] = []

    def evaluated(self, event: EvaluationEvent) -> None:
        self.found.append(event)


def test_the_best_checkpoint_and_the_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The mean reward of held-out prompts decides, and falls where the learning rate is far too large."""
    heard = Heard()
    settings = evaluating(
        tmp_path, checkpoint__keep_best="true", checkpoint__keep=1, train__early_stopping_patience=2, optim__lr=0.5,
        train__steps=12, rollout__eval_temperature=0,
    )  # fmt: skip
    del settings["rollout.eval_generations"]
    summary = train(load_config(options(settings)), heard)
    found = {step: figures["eval/reward"] for step, figures in evaluations(tmp_path / "run").items()}
    assert [one.figures["eval/reward"] for one in heard.found] == [*found.values()]
    assert all(math.isnan(one.loss) and "eval/pass@2" not in one.figures for one in heard.found)
    best = max(found, key=lambda step: (found[step], -step))
    assert summary.steps == best + 2 < 12, found
    said = capfd.readouterr().err
    assert f"step {best + 2}: eval/reward has not risen above {found[best]:.4f} for 2 evaluations" in said
    assert summary.judge == "eval/reward" and summary.eval_losses[0] == (0, found[0])
    if best:
        assert str(summary.best).startswith(f"{found[best]:.4f} (step {best})")
        export(tmp_path / "run", tmp_path / "out", step="best")
        card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
        assert f"{found[best]:.4f}" in card and "evaluation loss" not in card


@pytest.mark.slow
def test_completions_without_rewards(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One function gives no reward to every second completion, and one fails on all held-out prompts: evaluations
    continue, and say so."""
    settings = evaluating(tmp_path, train__steps=1)
    given = settings | {"rollout.rewards": f"{tmp_path}/noting.py:half"}
    run_here(given)
    figures = evaluations(tmp_path / "run")[0]
    assert figures["eval/reward"] == 0.5 and figures["eval/unscored"] == pytest.approx(7 / 15)
    assert figures["eval/pass@1"] == 1.0
    run_here(settings | {"rollout.rewards": f"{tmp_path}/noting.py:gone", "checkpoint.dir": tmp_path / "gone"})
    figures = evaluations(tmp_path / "gone")[1]
    assert figures["eval/reward"] == figures["eval/pass@1"] == "NaN" and figures["eval/unscored"] == 1
    assert "warning: evaluation after step 1: reward gone gave no reward for a completion of" in capfd.readouterr().err


@pytest.mark.slow
def test_held_out_prompts(tmp_path: Path) -> None:
    """A share of the prompts, of which the first two are evaluated, and none is trained on."""
    settings = evaluating(tmp_path, train__eval_samples=2, data__validation_split=0.25, train__steps=5)
    del settings["data.validation"]
    prompts = (tmp_path / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    changed = [json.dumps(json.loads(line) | {"answer": str(place)}) for place, line in enumerate(prompts)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(changed), encoding="utf-8")
    run_here(settings)
    rows = [json.loads(line) for line in (tmp_path / "noting.py.jsonl").read_text(encoding="utf-8").splitlines()]
    first = [row[2] for row in rows[: 2 * MEMBERS]]
    assert len({*first}) == 2 and len(rows) == 5 * 32 + 32 + 6 * 2 * MEMBERS
    trained = {row[2] for row in rows[2 * MEMBERS : 2 * MEMBERS + 64]}
    assert not trained & {*first}
    # nine of 36 are held out, so that 27 are trained on
    assert len({row[2] for row in rows} - {*first}) == 27


@pytest.mark.slow
def test_a_server_evaluates(tmp_path: Path) -> None:
    """While the next batch is sampled by the adapter before, evaluations have the current one, and a checkpoint keeps
    that of the batch; both are unloaded."""
    served_settings(tmp_path)
    found = {}
    with StandIn(tmp_path / "model") as server:
        for overlap in ("false", "true"):
            settings = evaluating(
                tmp_path, train__global_batch_size=8, train__micro_batch_size=1, rollout__overlap=overlap,
                rollout__server=server.url, checkpoint__dir=tmp_path / overlap, checkpoint__every=1,
                checkpoint__keep=0,
            )  # fmt: skip
            del settings["model.init"]
            run_here(settings | {"model.path": server.model})
            assert server.adapters == {}
            run_here(without(settings | {"model.path": server.model}, tmp_path / f"{overlap} plain"))
            same_training(tmp_path / overlap, tmp_path / f"{overlap} plain", 4)
            found[overlap] = evaluations(tmp_path / overlap)
        for step in (2, 3, 4):
            shutil.rmtree(tmp_path / "true" / "checkpoints" / f"step_{step:08d}")
        run_here(settings | {"model.path": server.model})
        same_training(tmp_path / "true", tmp_path / "true plain", 4)
        assert evaluations(tmp_path / "true") == found["true"]
    assert [*found["true"]] == [0, 1, 2, 3, 4] and found["true"][0] == found["false"][0]
    assert not (tmp_path / "true" / "served_adapters").exists()


@pytest.mark.slow
def test_tools_and_environments(tmp_path: Path) -> None:
    """Held-out conversations call tools too."""
    settings = tool_settings(tmp_path, train__steps=1, train__global_batch_size=16, rollout__slots=4)
    settings |= {"data.validation_split": 0.2, "rollout.eval_generations": 2}
    run_here(settings)
    figures = evaluations(tmp_path / "run")[1]
    assert figures["eval/turns/mean"] > 1 and figures["eval/tools/call_frequency"] > 0
