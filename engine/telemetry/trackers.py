"""Experiment trackers: TensorBoard, Weights & Biases, MLflow, which get a run's metrics from one rank.

The packages are optional, and imported only where they are used (`engine.telemetry.tracker_packages`). A tracker that
fails or hangs during a run causes one warning: metrics are no reason to stop, and the metrics file has them all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, Protocol

from engine.errors import UserError
from engine.seams import resolve

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
TENSORBOARD, WANDB, MLFLOW = (field.name for field in fields(TrackerChoice))


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
                problem = first_line(error)
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
        if value and not _is_installed(package_of(option)):
            raise missing_package(option, value)


def open_trackers(choice: TrackerChoice, run: TrackedRun, warn: Callable[[str], None]) -> Trackers:
    """Opens the trackers that are asked for.

    Raises:
        UserError: one is not installed or cannot start.
    """
    found: list[Tracker] = []
    if choice.tensorboard:
        found.append(resolve("engine.telemetry.tracker_packages:TensorBoard")(run))
    if choice.wandb_project is not None:
        found.append(resolve("engine.telemetry.tracker_packages:Wandb")(run, choice.wandb_project))
    if choice.mlflow_experiment is not None:
        found.append(resolve("engine.telemetry.tracker_packages:Mlflow")(run, choice.mlflow_experiment))
    return Trackers(found, warn)


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # imported already, without a spec
        return True


def package_of(option: str) -> str:
    """Returns the package that an option needs, which is an extra of the same name."""
    return option.partition("_")[0]


def missing_package(option: str, value: object) -> UserError:
    """Returns the refusal of an option whose package is not installed."""
    package, switched = package_of(option), value is True
    return UserError(
        f"log.{option} is {'true' if switched else value}, but the {package} package is not installed: install the "
        f"{package} extra (pip install {package}), or set log.{option} to {'false' if switched else 'null'}."
    )


def first_line(error: Exception) -> str:
    """Returns the first line of an error's text, or its kind where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
