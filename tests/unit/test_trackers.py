"""What trackers are told: read back from TensorBoard, and from wandb and MLflow where they are installed.

Where they are not, stand-ins record the calls that the packages' documentation asks for.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from engine.errors import UserError
from engine.telemetry.metrics import MetricsWriter
from engine.telemetry.tracker_packages import Mlflow, TensorBoard, Wandb
from engine.telemetry.trackers import TrackedRun, TrackerChoice, Trackers, check_trackers, open_trackers


def run_in(folder: Path) -> TrackedRun:
    folder.mkdir(exist_ok=True)
    return TrackedRun(
        folder=folder,
        names=folder / "names.json",
        events=folder / "tensorboard",
        database=folder / "mlflow.db",
        config="optim:\n  lr: 0.1\n",
        options={"optim.lr": 0.1, "trainable": ["*"]},
    )


def write(writer: MetricsWriter) -> None:
    """A step, an evaluation, a checkpoint and a text."""
    writer.train(step=3, loss=1.5, grad_norm=0.25, lr=1e-4, tokens=8, seconds=2.0, memory=10)
    writer.evaluation(step=3, eval_loss=1.25)
    writer.write({"step": 3, "save_seconds": 0.5})
    writer.text(step=3, name="sample/1", text="Once upon\na time")
    writer.close()


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write(MetricsWriter(None, open_trackers(TrackerChoice(tensorboard=True), run_in(tmp_path / "run"), print)))
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    (loss,) = events.Scalars("train/loss")
    (evaluation,) = events.Scalars("eval/eval_loss")
    assert (loss.step, loss.value, evaluation.value) == (3, 1.5, 1.25)
    assert events.Scalars("train/tokens_per_second")[0].value == 4.0
    (config,) = events.Tensors("config/text_summary")
    assert config.tensor_proto.string_val[0].decode() == "    optim:\n      lr: 0.1"
    (sample,) = events.Tensors("sample/1/text_summary")
    assert sample.step == 3 and b"Once upon" in sample.tensor_proto.string_val[0]


@pytest.mark.parametrize(
    ("package", "choice", "make"),
    [
        ("tensorboard", TrackerChoice(tensorboard=True), TensorBoard),
        ("wandb", TrackerChoice(wandb_project="p"), lambda run: Wandb(run, "p")),
        ("mlflow", TrackerChoice(mlflow_experiment="e"), lambda run: Mlflow(run, "e")),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    package: str,
    choice: TrackerChoice,
    make: Callable[[TrackedRun], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.startswith(("torch.utils.tensorboard", package))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    sentence = (
        rf"log\.{package}.*, but the {package} package is not installed: install the {package} extra .*, or set log."
    )
    with pytest.raises(UserError, match=sentence):
        check_trackers(choice)
    with pytest.raises(UserError, match=sentence):
        make(run_in(tmp_path / "run"))
    check_trackers(TrackerChoice())


class Hangs:
    """The answer of a call that takes far too long."""


class Recorder:
    """Takes any call and keeps it."""

    def __init__(self, calls: list[tuple[Any, ...]], answers: dict[str, Any]) -> None:
        self._calls, self._answers = calls, answers

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self._calls.append((name, args, kwargs))
            answer = self._answers.get(name)
            if isinstance(answer, Exception):
                raise answer
            if isinstance(answer, Hangs):
                time.sleep(5)
            return answer

        return call


class PackageError(Exception):
    """What a package raises."""


def fake_wandb(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    module = ModuleType("wandb")
    run = Recorder(calls, answers)
    run.id = "abc123"
    module.Error = PackageError  # type: ignore[attr-defined]
    module.init = getattr(Recorder(calls, {"init": run, **answers}), "init")  # type: ignore[attr-defined] # noqa: B009
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


def test_wandb_is_told_of_figures_and_goes_on_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, run = fake_wandb(monkeypatch), run_in(tmp_path / "mine")
    write(MetricsWriter(None, Trackers([Wandb(run, "p")])))
    assert calls[0] == (
        "init", (),
        {"project": "p", "name": "mine", "dir": str(run.folder), "config": {"optim": {"lr": 0.1}, "trainable": ["*"]},
         "id": None, "resume": "allow"},
    )  # fmt: skip
    logged = [args[0] for name, args, _ in calls if name == "log"]
    assert [entry["step"] for entry in logged] == [3, 3, 3, 3]
    assert logged[0]["train/loss"] == 1.5 and logged[1] == {"step": 3, "eval/eval_loss": 1.25}
    assert logged[3] == {"step": 3, "sample/1": "Once upon\na time"}
    assert calls[-1] == ("finish", (), {"exit_code": 0})
    assert ("define_metric", ("*",), {"step_metric": "step"}) in calls
    assert json.loads((run.names).read_text()) == {"wandb_project": "abc123"}
    calls.clear()
    Wandb(run, "p").close("failed")
    assert calls[0][2]["id"] == "abc123" and calls[-1] == ("finish", (), {"exit_code": 1})


def test_a_tracker_that_cannot_start_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_wandb(monkeypatch, init=PackageError("api_key not configured\nsecond line"))
    with pytest.raises(
        UserError, match=r"log.wandb_project is p, but .* start \(api_key not configured\): run wandb login"
    ):
        Wandb(run_in(tmp_path / "run"), "p")


def test_a_tracker_that_fails_is_said_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, said = fake_wandb(monkeypatch, log=PackageError("the network is gone")), list[str]()
    path = tmp_path / "metrics.jsonl"
    write(MetricsWriter(path, open_trackers(TrackerChoice(wandb_project="p"), run_in(tmp_path / "run"), said.append)))
    assert said == [
        "Weights & Biases gets no more figures of this run (the network is gone); training continues, and log.metrics "
        "has them all"
    ]
    assert len([name for name, *_ in calls if name == "log"]) == 1
    assert len(path.read_text().splitlines()) == 4


def test_a_tracker_that_hangs_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that answers byte by byte held a step for ever."""
    fake_wandb(monkeypatch, log=Hangs())
    monkeypatch.setattr("engine.telemetry.trackers._TELL_SECONDS", 0.2)
    said = list[str]()
    begin = time.monotonic()
    write(MetricsWriter(None, open_trackers(TrackerChoice(wandb_project="p"), run_in(tmp_path / "run"), said.append)))
    assert time.monotonic() - begin < 1 and len(said) == 1
    assert "no more figures of this run (it did not take the last ones within 0.2 s); training continues" in said[0]


def test_a_defect_in_a_tracker_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_wandb(monkeypatch, log=KeyError("x"))
    with pytest.raises(KeyError):
        write(MetricsWriter(None, Trackers([Wandb(run_in(tmp_path / "run"), "p")])))


def fake_mlflow(monkeypatch: pytest.MonkeyPatch, *, uri_set: bool) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    run = SimpleNamespace(info=SimpleNamespace(run_id="r1"))
    client = Recorder(calls, {"create_experiment": "7", "create_run": run})
    module = ModuleType("mlflow")
    module.exceptions = SimpleNamespace(MlflowException=PackageError)  # type: ignore[attr-defined]
    module.entities = SimpleNamespace(  # type: ignore[attr-defined]
        Param=lambda *args: ("param", *args), Metric=lambda *args: ("metric", *args)
    )
    module.utils = SimpleNamespace(time=SimpleNamespace(get_current_time_millis=lambda: 99))  # type: ignore[attr-defined]
    module.is_tracking_uri_set = lambda: uri_set  # type: ignore[attr-defined]

    def make(tracking_uri: str | None) -> Recorder:
        calls.append(("client", (tracking_uri,), {}))
        return client

    module.MlflowClient = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return calls


@pytest.mark.parametrize("uri_set", [False, True])
def test_mlflow_is_told_of_figures_and_goes_on_with_its_run(
    uri_set: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, run = fake_mlflow(monkeypatch, uri_set=uri_set), run_in(tmp_path / "mine")
    write(MetricsWriter(None, Trackers([Mlflow(run, "e")])))
    assert calls[0] == ("client", (None if uri_set else f"sqlite:///{run.folder.resolve()}/mlflow.db",), {})
    assert ("create_run", ("7",), {"run_name": "mine"}) in calls
    batches = [(args, kwargs) for name, args, kwargs in calls if name == "log_batch"]
    assert batches[0] == (("r1",), {"params": [("param", "optim.lr", "0.1"), ("param", "trainable", "['*']")]})
    assert ("metric", "train/loss", 1.5, 99, 3) in batches[1][1]["metrics"]
    assert batches[2][1]["metrics"] == [("metric", "eval/eval_loss", 1.25, 99, 3)]
    assert ("log_text", ("r1", "Once upon\na time", "sample/1/step_00000003.txt"), {}) in calls
    assert calls[-1] == ("set_terminated", ("r1", "FINISHED"), {})
    calls.clear()
    Mlflow(run, "e").close("stopped")
    assert calls[1] == ("update_run", ("r1",), {"status": "RUNNING"})
    assert calls[-1] == ("set_terminated", ("r1", "KILLED"), {}) and len(calls) == 3


def test_wandb_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = run_in(tmp_path / "run")
    write(MetricsWriter(None, Trackers([Wandb(run, "p")])))
    wandb.teardown()  # its process writes what it holds
    (kept,) = (run.folder / "wandb").glob("offline-run-*/run-*.wandb")
    content = kept.read_bytes()
    assert b"eval/eval_loss" in content and b"1.25" in content and b"Once upon" in content
    assert json.loads((run.names).read_text())["wandb_project"] in kept.name


def test_mlflow_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    run = run_in(tmp_path / "run")
    write(MetricsWriter(None, Trackers([Mlflow(run, "e")])))
    identity = json.loads((run.names).read_text())["mlflow_experiment"]
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{run.folder.resolve()}/mlflow.db")
    found = client.get_run(identity)
    assert found.info.status == "FINISHED" and found.data.params["optim.lr"] == "0.1"
    ((loss,), (evaluation,)) = (client.get_metric_history(identity, name) for name in ("train/loss", "eval/eval_loss"))
    assert (loss.step, loss.value, evaluation.value) == (3, 1.5, 1.25)
    Mlflow(run, "e").close("stopped")
    assert client.get_run(identity).info.status == "KILLED"
