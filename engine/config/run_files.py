"""The names of the files in a run's folder, for all code that writes or reads one of them."""

from __future__ import annotations

LOCK = "run.lock"
CONFIG = "config.yaml"
"""The resolved configuration."""
ENVIRONMENT = "environment.json"
"""Versions, machine and layout."""
TRACKERS = "trackers.json"
"""The trackers' ids of the run, with which a resumed run continues there."""
MLFLOW = "mlflow.db"
"""MLflow's database, where no tracking URI is given."""
FILES = (LOCK, CONFIG, ENVIRONMENT, TRACKERS, MLFLOW)

CHECKPOINTS = "checkpoints"
TELEMETRY = "telemetry"
"""Telemetry of each rank."""
HANGS = "hangs"
"""Stacks of all ranks, written when the run hangs."""
TRACES = "traces"
"""Traces by torch's profiler."""
TENSORBOARD = "tensorboard"
WANDB = "wandb"
"""Folder of Weights & Biases, which chooses this name."""
FOLDERS = (CHECKPOINTS, TELEMETRY, HANGS, TRACES, TENSORBOARD, WANDB)

REFERENCE = "reference-"
"""Prefix of files with the reference's log-likelihoods."""
REPORT = "report.html"


def is_taken(name: str) -> bool:
    """Returns whether a file of another kind may not have this name; names with a leading dot are of temporary
    files.

    Some file systems ignore case, some drop dots and blanks at the end, and a file is
    replaced by way of another one beside it.
    """
    plain = name.casefold().rstrip(". ")
    beside = plain.removesuffix(".tmp").removesuffix(".new")
    return plain.startswith((".", REFERENCE)) or beside in (*FILES, *FOLDERS, REPORT)
