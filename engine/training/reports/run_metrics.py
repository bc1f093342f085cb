"""Opens the destinations of a run's metrics: its own file, and the trackers."""

from __future__ import annotations

from pathlib import Path

from engine.config.load import to_yaml
from engine.config.log import LogOptions
from engine.config.resume_rules import flat_options
from engine.config.run import RunConfig
from engine.config.run_files import CONFIG, MLFLOW, TENSORBOARD, TRACKERS
from engine.config.snapshots import records
from engine.files.durable import write_durably
from engine.telemetry.log import Log
from engine.telemetry.metrics import MetricsWriter
from engine.telemetry.trackers import TrackedRun, TrackerChoice, Trackers, open_trackers


def tracker_choice(options: LogOptions) -> TrackerChoice:
    """Returns the trackers that the options ask for."""
    return TrackerChoice(
        tensorboard=options.tensorboard,
        wandb_project=options.wandb_project,
        mlflow_experiment=options.mlflow_experiment,
    )


def open_run_trackers(config: RunConfig, run_dir: Path, log: Log) -> Trackers:
    """Opens the run's trackers, of which only rank 0 has any.

    Raises:
        UserError: a tracker cannot start.
    """
    if not log.enabled:
        return Trackers()
    text = to_yaml(records(config))
    run = TrackedRun(
        folder=run_dir,
        names=run_dir / TRACKERS,
        events=run_dir / TENSORBOARD,
        database=run_dir / MLFLOW,
        config=text,
        options=flat_options(text),
    )
    return open_trackers(tracker_choice(config.log), run, log.warning)


def open_metrics(config: RunConfig, run_dir: Path, log: Log, trackers: Trackers) -> MetricsWriter:
    """Opens the run's metrics, and writes a copy of its configuration beside them. Only rank 0 writes anything.

    Raises:
        UserError: a file cannot be written.
    """
    if not log.enabled:
        return MetricsWriter(None)
    write_durably(run_dir / CONFIG, to_yaml(records(config)))
    return MetricsWriter(run_dir / config.log.metrics if config.log.metrics else None, trackers)
