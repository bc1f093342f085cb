"""Reading the figures of a step waits for that step, and not for the one that was launched behind it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from engine.config.log import LogOptions
from engine.distributed.mesh import Axis, single_process_mesh
from engine.distributed.ranks import RankGrid
from engine.layers.host_copies import HostCopy
from engine.training.guards.fingerprint import Fingerprints
from engine.training.guards.replicas import ReplicaGuard
from engine.training.observer import LaunchedStep
from engine.training.reports.step_reporter import RunClock, StepReporter
from engine.training.step import StepFigures, StepResult
from tests.distributed.guarded_runs import OPTIONS, build_run, guards_of
from tests.distributed.sharded_runs import Layout
from tests.support.device_stand_in import OnDevice, Stream, device_stand_in

STEPS = 8


class _Told:
    """Takes the calls of a reporter, and keeps the figures that the metrics file would get."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def train(self, **figures: Any) -> None:
        self.steps.append(figures)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **figures: None


def _reporter(every: int, said: list[str]) -> tuple[StepReporter, _Told]:
    """A reporter with the guards of a real run, which judge the figures they are given."""
    told = cast(Any, _Told())
    objective = SimpleNamespace(
        loss_at_chance=None, shown=("accuracy",), named=lambda values: dict(zip(("accuracy",), values, strict=True))
    )
    training = SimpleNamespace(objective=objective, optimizer=SimpleNamespace(loss_scale=object()))
    source = SimpleNamespace(stalled=0.0, work_seconds={}, shown={})
    reporter = StepReporter(
        LogOptions(every=every), cast(Any, training), cast(Any, source), RunClock(), metrics=told, progress=told,
        listener=told, observers=[guards_of(build_run(Layout(case="adapters", grid=RankGrid())), OPTIONS, said)],
    )  # fmt: skip
    return reporter, told


def _step(stream: Stream, number: int) -> StepResult:
    """A step that launches some work and returns figures made of its number."""
    value = OnDevice(torch.tensor(float(number)), stream)
    for _ in range(5):
        value = value + 0.0
    return StepResult(value * 1.0, value * 10.0, (value * 100.0).view(1), value * 0.0 + 8.0)


@pytest.mark.parametrize("every", [1, 3])
def test_a_report_waits_for_its_own_step_alone(every: int) -> None:
    said: list[str] = []
    reporter, told = _reporter(every, said)
    with device_stand_in() as stream:
        ends = [0]
        for number in range(1, STEPS + 1):
            result = _step(stream, number)
            ends.append(stream.launched)
            launched = LaunchedStep(number, [], 1.0, 1e-3, 0, result, StepFigures(result))
            copied = stream.launched - ends[-1]
            reporter.after(launched, rows=1, tokens=1, figures={"reward": number / 2})
            assert stream.waited <= ends[number - 1] + copied, "the report waited for the step that had just begun"
        reporter.catch_up(last=True)
    reported = [number for number in range(1, STEPS + 1) if number % every == 0 or number == STEPS]
    assert [one["step"] for one in told.steps] == reported
    for one in told.steps:
        number = float(one["step"])
        assert (one["loss"], one["grad_norm"], one["accuracy"]) == (number, number * 10, number * 100)
        assert one["loss_scale"] == 8.0 and one["reward"] == number / 2


def test_a_copy_is_of_its_moment() -> None:
    """What is written to the tensor afterwards does not reach the copy, with a device or without."""
    value = torch.tensor([1.0, 2.0])
    copy = HostCopy(value)
    value.fill_(9.0)
    assert copy.read().tolist() == [1.0, 2.0]
    with device_stand_in() as stream:
        lying = OnDevice(torch.tensor([3.0]), stream)
        copy = HostCopy(lying)
        end = stream.launched
        lying.fill_(9.0)
        assert copy._host.isnan().all() and stream.waited == 0  # nobody has waited yet
        assert copy.read().tolist() == [3.0] and stream.waited == end < stream.launched


def test_a_comparison_of_replicas_waits_for_its_own_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one number that says whether any rank saw a difference is on its way when the comparison was started."""
    with device_stand_in() as stream:

        def reduced(tensor: Tensor, *_: Any) -> Tensor:
            return OnDevice(tensor, stream) + 0

        monkeypatch.setattr("engine.training.guards.replicas.all_reduce", reduced)
        guard = ReplicaGuard((), (), None, single_process_mesh(), Axis("world"), Fingerprints(torch.device("cpu")))
        pending = guard.start(1, frozen=False, numbers={})
        end = stream.launched
        _step(stream, 2)
        assert guard.finish(pending) == [] and stream.waited == end
