"""Runs that tell trackers of their figures."""

from __future__ import annotations

import sys

import pytest

from tests.small_runs.conftest import SmallRuns
from tests.unit.test_trackers import fake_wandb


def test_a_missing_package_is_told_before_anything_is_read(run: SmallRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    said = run(status=2, log__wandb_project="mine")
    assert "log.wandb_project is mine, but the wandb package is not installed: install the wandb extra" in said
    assert "reading" not in said


def test_a_run_tells_of_its_steps_and_its_end(run: SmallRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_wandb(monkeypatch)
    run(log__wandb_project="mine", train__steps=3, data__validation=run.place.train, log__metrics="null")
    (begun, *_), logged = calls, [args[0] for name, args, _ in calls if name == "log"]
    assert begun[2]["name"] == "run" and begun[2]["config"]["optim"]["lr"] == 0.01
    assert [entry["step"] for entry in logged if "train/loss" in entry] == [1, 2, 3]
    assert [entry["step"] for entry in logged if "eval/eval_loss" in entry] == [0, 3]
    assert calls[-1][0] == "finish"
