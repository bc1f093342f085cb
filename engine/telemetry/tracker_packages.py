"""The trackers by their packages: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from engine.errors import UserError
from engine.files.durable import write_durably
from engine.telemetry.trackers import (
    MLFLOW,
    TENSORBOARD,
    WANDB,
    Ending,
    TrackedRun,
    first_line,
    missing_package,
    package_of,
)


class TensorBoard:
    """The tracker that writes TensorBoard's event files."""

    name = "TensorBoard"
    errors: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, run: TrackedRun) -> None:
        module = _imported("torch.utils.tensorboard", TENSORBOARD, True)
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
        wandb = _imported(package_of(WANDB), WANDB, project)
        self.errors: tuple[type[Exception], ...] = (wandb.Error, OSError)
        try:
            self._run = wandb.init(
                project=project,
                name=run.folder.name,
                dir=str(run.folder),
                config=_nested(run.options),
                id=_known(run.names, WANDB),
                resume="allow",
            )
        except self.errors as error:
            raise UserError(
                f"log.wandb_project is {project}, but Weights & Biases cannot start ({first_line(error)}): run wandb "
                "login, set WANDB_MODE=offline to keep the figures here, or set log.wandb_project to null."
            ) from None
        _remember(run.names, WANDB, str(self._run.id))
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
        mlflow = _imported(package_of(MLFLOW), MLFLOW, experiment)
        self.errors: tuple[type[Exception], ...] = (mlflow.exceptions.MlflowException, OSError)
        self._mlflow, uri = mlflow, None
        if not mlflow.is_tracking_uri_set():
            uri = f"sqlite:///{run.database.resolve()}"
        try:
            self._client = mlflow.MlflowClient(tracking_uri=uri)
            self._id = self._begin(run, experiment)
        except self.errors as error:
            raise UserError(
                f"log.mlflow_experiment is {experiment}, but MLflow cannot start ({first_line(error)}): look at "
                "MLFLOW_TRACKING_URI, or set log.mlflow_experiment to null."
            ) from None
        _remember(run.names, MLFLOW, self._id)

    def _begin(self, run: TrackedRun, experiment: str) -> str:
        """Starts a run, or continues the one that this run had before, and returns its id."""
        client, entities = self._client, self._mlflow.entities
        if (known := _known(run.names, MLFLOW)) is not None:
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


def _imported(module: str, option: str, value: object) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise missing_package(option, value) from None


def _known(names: Path, option: str) -> str | None:
    """Returns the run's id in a tracker; None where it is new."""
    try:
        found = json.loads(names.read_text(encoding="utf-8")).get(option)
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def _remember(names: Path, option: str, identity: str) -> None:
    known = {one: found for one in (WANDB, MLFLOW) if (found := _known(names, one)) is not None}
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
