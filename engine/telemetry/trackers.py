"""Experiment trackers: TensorBoard, Weights & Biases, MLflow, which get a run's metrics from one rank.

The packages are optional, and imported only where they are used. A tracker that fails or hangs during a run causes
one warning: metrics are no reason to stop, and the metrics file has them all.
"""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any, Literal, Protocol

from engine.errors import UserError
from engine.files.durable import write_durably

Ending = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackerChoice:
    """The trackers that a run uses.

    Args:
        tensorboard: write event files.
        wandb_project, mlflow_experiment: where in Weights & Biases and MLflow; None switches them off.
    """

    tensorboard: bool = False
    wandb_project: str | None = None
    mlflow_experiment: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """The facts about a run that trackers get.

    Args:
        folder: of the run; Weights & Biases creates a folder there.
        names: file with the trackers' ids of the run, with which a resumed run continues there.
        events: folder for TensorBoard's files.
        database: of MLflow, where no tracking URI is given.
        config: the configuration, as YAML.
        options: the same by name, such as {"optim.lr": 2e-4}.
    """

    folder: Path
    names: Path
    events: Path
    database: Path
    config: str
    options: Mapping[str, Any]


_TELL_SECONDS = 60.0
"""Seconds that training waits for a tracker, once: then it gets no more."""
_CLOSE_SECONDS = 600.0
"""For which the end of a run waits for a tracker, which may have much left to upload."""
_TENSORBOARD, _WANDB, _MLFLOW = (field.name for field in fields(TrackerChoice))


class Tracker(Protocol):
    """The interface of a tracker."""

    name: str
    errors: tuple[type[Exception], ...]
    """The exceptions that the other methods raise where the tracker fails."""

    def figures(self, step: int, values: Mapping[str, float]) -> None:
        """Logs figures by name, such as train/loss."""
        ...

    def text(self, step: int, name: str, text: str) -> None: ...

    def close(self, ending: Ending) -> None: ...


class TensorBoard:
    """The tracker that writes TensorBoard's event files."""

    name = "TensorBoard"
    errors: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, run: TrackedRun) -> None:
        module = _imported("torch.utils.tensorboard", _TENSORBOARD, True)
        self._writer = module.SummaryWriter(str(run.events))
        self._writer.add_text("config", _indented(run.config), 0)

    def figures(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def text(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(name, _indented(text), step)

    def close(self, ending: Ending) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases; WANDB_MODE=offline keeps it in the run's folder.

    Args:
        project: its project.

    Raises:
        UserError: wandb is not installed, or cannot start.
    """

    name = "Weights & Biases"

    def __init__(self, run: TrackedRun, project: str) -> None:
        wandb = _imported(_package(_WANDB), _WANDB, project)
        self.errors: tuple[type[Exception], ...] = (wandb.Error, OSError)
        try:
            self._run = wandb.init(
                project=project,
                name=run.folder.name,
                dir=str(run.folder),
                config=_nested(run.options),
                id=_known(run.names, _WANDB),
                resume="allow",
            )
        except self.errors as error:
            raise UserError(
                f"log.wandb_project is {project}, but Weights & Biases cannot start ({_first_line(error)}): run wandb "
                "login, set WANDB_MODE=offline to keep the figures here, or set log.wandb_project to null."
            ) from None
        _remember(run.names, _WANDB, str(self._run.id))
        # not wandb's own count, which only rises: a run that resumes from a checkpoint repeats steps
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def figures(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def text(self, step: int, name: str, text: str) -> None:
        self._run.log({"step": step, name: text})

    def close(self, ending: Ending) -> None:
        self._run.finish(exit_code=1 if ending == "failed" else 0)


class Mlflow:
    """A run of MLflow, where MLFLOW_TRACKING_URI says, else in a database in the run's folder.

    Args:
        experiment: its experiment, which is made where there is none.

    Raises:
        UserError: mlflow is not installed, or its server does not answer.
    """

    name = "MLflow"

    def __init__(self, run: TrackedRun, experiment: str) -> None:
        mlflow = _imported(_package(_MLFLOW), _MLFLOW, experiment)
        self.errors: tuple[type[Exception], ...] = (mlflow.exceptions.MlflowException, OSError)
        self._mlflow, uri = mlflow, None
        if not mlflow.is_tracking_uri_set():
            uri = f"sqlite:///{run.database.resolve()}"
        try:
            self._client = mlflow.MlflowClient(tracking_uri=uri)
            self._id = self._begin(run, experiment)
        except self.errors as error:
            raise UserError(
                f"log.mlflow_experiment is {experiment}, but MLflow cannot start ({_first_line(error)}): look at "
                "MLFLOW_TRACKING_URI, or set log.mlflow_experiment to null."
            ) from None
        _remember(run.names, _MLFLOW, self._id)

    def _begin(self, run: TrackedRun, experiment: str) -> str:
        """Starts a run, or continues the one that this run had before, and returns its id."""
        client, entities = self._client, self._mlflow.entities
        if (known := _known(run.names, _MLFLOW)) is not None:
            client.update_run(known, status="RUNNING")
            return known
        found = client.get_experiment_by_name(experiment)
        place = client.create_experiment(experiment) if found is None else found.experiment_id
        identity = str(client.create_run(place, run_name=run.folder.name).info.run_id)
        params = [entities.Param(name, str(value)[:500]) for name, value in run.options.items()]
        for first in range(0, len(params), 100):  # the most that one call takes
            client.log_batch(identity, params=params[first : first + 100])
        return identity

    def figures(self, step: int, values: Mapping[str, float]) -> None:
        now = self._mlflow.utils.time.get_current_time_millis()
        metrics = [self._mlflow.entities.Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def text(self, step: int, name: str, text: str) -> None:
        self._client.log_text(self._id, text, f"{name}/step_{step:08d}.txt")

    def close(self, ending: Ending) -> None:
        status = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[ending]
        self._client.set_terminated(self._id, status)


class Trackers:
    """All trackers of a run.

    Args:
        trackers: the open ones.
        warn: called with a line where one of them fails.
    """

    def __init__(self, trackers: Sequence[Tracker] = (), warn: Callable[[str], None] = lambda _: None) -> None:
        self._trackers, self._warn = [(tracker, _Thread(tracker.name)) for tracker in trackers], warn

    def figures(self, step: int, values: Mapping[str, float]) -> None:
        """Logs figures of a step, by name."""
        self._tell(lambda tracker: tracker.figures(step, values))

    def text(self, step: int, name: str, text: str) -> None:
        """Logs a text that belongs to a step."""
        self._tell(lambda tracker: tracker.text(step, name, text))

    def close(self, ending: Ending) -> None:
        """Closes all trackers with the run's outcome."""
        self._tell(lambda tracker: tracker.close(ending), closing=True)
        self._trackers = []

    def _tell(self, say: Callable[[Tracker], None], *, closing: bool = False) -> None:
        seconds = _CLOSE_SECONDS if closing else _TELL_SECONDS
        for tracker, thread in list(self._trackers):
            told = thread.begin(partial(say, tracker))
            try:
                if wait([told], seconds).done:
                    told.result()
                    continue
                problem = f"it did not take the last ones within {seconds:g} s"
            except tracker.errors as error:
                problem = _first_line(error)
            self._trackers.remove((tracker, thread))
            self._warn(
                f"{tracker.name} gets no more figures of this run ({problem}); training continues, and log.metrics has "
                "them all"
            )


class _Thread:
    """A thread for the calls of one tracker, which may hang: its server may answer late or slowly. It ends
    with the process, whatever it does.

    Args:
        name: of the tracker.
    """

    def __init__(self, name: str) -> None:
        self._calls = SimpleQueue[tuple[Future[None], Callable[[], None]]]()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def begin(self, call: Callable[[], None]) -> Future[None]:
        """Begins a call when those before have ended; returns its outcome."""
        outcome = Future[None]()
        self._calls.put((outcome, call))
        return outcome

    def _run(self) -> None:
        while True:
            outcome, call = self._calls.get()
            try:
                call()
            except BaseException as error:
                outcome.set_exception(error)
            else:
                outcome.set_result(None)


def check_trackers(choice: TrackerChoice) -> None:
    """Checks that the packages are installed, without importing them.

    Raises:
        UserError: one is missing.
    """
    for option, value in asdict(choice).items():
        if value and not _is_installed(_package(option)):
            raise _missing(option, value)


def open_trackers(choice: TrackerChoice, run: TrackedRun, warn: Callable[[str], None]) -> Trackers:
    """Opens the trackers that are asked for.

    Raises:
        UserError: one is not installed or cannot start.
    """
    found: list[Tracker] = []
    if choice.tensorboard:
        found.append(TensorBoard(run))
    if choice.wandb_project is not None:
        found.append(Wandb(run, choice.wandb_project))
    if choice.mlflow_experiment is not None:
        found.append(Mlflow(run, choice.mlflow_experiment))
    return Trackers(found, warn)


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # imported already, without a spec
        return True


def _package(option: str) -> str:
    """Returns the package that an option needs, which is an extra of the same name."""
    return option.partition("_")[0]


def _imported(module: str, option: str, value: object) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise _missing(option, value) from None


def _missing(option: str, value: object) -> UserError:
    package, switched = _package(option), value is True
    return UserError(
        f"log.{option} is {'true' if switched else value}, but the {package} package is not installed: install the "
        f"{package} extra (pip install {package}), or set log.{option} to {'false' if switched else 'null'}."
    )


def _known(names: Path, option: str) -> str | None:
    """Returns the run's id in a tracker; None where it is new."""
    try:
        found = json.loads(names.read_text(encoding="utf-8")).get(option)
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def _remember(names: Path, option: str, identity: str) -> None:
    known = {one: found for one in (_WANDB, _MLFLOW) if (found := _known(names, one)) is not None}
    write_durably(names, json.dumps(known | {option: identity}) + "\n")


def _nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Nests options: {"optim.lr": 1} becomes {"optim": {"lr": 1}}."""
    nested: dict[str, Any] = {}
    for name, value in options.items():
        section, _, key = name.rpartition(".")
        place = nested.setdefault(section, {}) if section else nested
        place[key] = value
    return nested


def _indented(text: str) -> str:
    """Returns Markdown that shows the lines unchanged."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
