"""What the guards make of a gradient that overflows under a loss scale: normal until the scale is at its floor."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.distributed.ranks import RankGrid
from engine.errors import UserError
from engine.optim.loss_scale import LossScale
from engine.training.guards.run_guards import Guards
from engine.training.observer import LaunchedStep
from engine.training.step import StepFigures, StepResult
from tests.distributed.guarded_runs import OPTIONS, build_run, guards_of
from tests.distributed.sharded_runs import Layout

ALONE = Layout(case="adapters", grid=RankGrid())


def _see(guards: Guards, step: int, *, loss: float, scale: float) -> None:
    figures = [torch.tensor(value) for value in (loss, float("inf"), scale)]
    result = StepResult(figures[0], figures[1], torch.zeros(0), figures[2])
    guards.after(LaunchedStep(step, [], 1.0, 1e-3, 0, result, StepFigures(result)))
    guards.judge(step)


def _guards(said: list[str], *, scaled: bool) -> Guards:
    run = build_run(ALONE)
    if scaled:
        run.optimizer.loss_scale = LossScale(2.0**20, 2, torch.device("cpu"))
    guards = guards_of(run, replace(OPTIONS, locate_non_finite=False), said)
    guards.begin(0, 0)
    return guards


def test_overflows_are_told_and_count_only_at_the_floor() -> None:
    said: list[str] = []
    guards = _guards(said, scaled=True)
    for step in range(1, 21):  # twice as many as may be skipped
        _see(guards, step, loss=3.0, scale=2.0 ** (21 - step))
    assert said[0] == "step 1: the gradient overflowed, the update was skipped and the loss scale 1.04858e+06 halved"
    assert [line for line in said if line.startswith("warning")] == [said[-1]]
    assert "the loss scale is at its floor of 1" in said[-1]
    assert len(said) == 21
    for step in range(21, 30):
        _see(guards, step, loss=3.0, scale=1.0)
    assert all("not finite, the update was skipped" in line for line in said[21:])
    with pytest.raises(UserError, match="the last 10 steps up to step 30"):
        _see(guards, 30, loss=3.0, scale=1.0)


@pytest.mark.parametrize(("scaled", "loss"), [(False, 3.0), (True, float("nan"))])
def test_without_a_scale_or_with_a_loss_that_is_not_finite_it_is_a_fault(scaled: bool, loss: float) -> None:
    said: list[str] = []
    _see(_guards(said, scaled=scaled), 1, loss=loss, scale=64.0)
    assert "not finite, the update was skipped" in said[0]
