"""What a run keeps in its folder, by name. Whoever writes or reads one of these takes its name from here."""

from __future__ import annotations

LOCK = "run.lock"
CONFIG = "config.yaml"
"""The resolved configuration."""
ENVIRONMENT = "environment.json"
"""Versions, machine and layout."""
TRACKERS = "trackers.json"
"""What trackers call the run, so that it goes on there when it resumes."""
MLFLOW = "mlflow.db"
"""MLflow's database, where no other place was given."""
FILES = (LOCK, CONFIG, ENVIRONMENT, TRACKERS, MLFLOW)

CHECKPOINTS = "checkpoints"
TELEMETRY = "telemetry"
"""What each rank sees of itself."""
HANGS = "hangs"
"""What each rank did when nothing went on."""
TRACES = "traces"
"""Traces by torch's profiler."""
TENSORBOARD = "tensorboard"
WANDB = "wandb"
"""What Weights & Biases keeps, which gives the folder its name."""
FOLDERS = (CHECKPOINTS, TELEMETRY, HANGS, TRACES, TENSORBOARD, WANDB)

REFERENCE = "reference-"
"""Files with the reference's likelihoods begin with this."""
REPORT = "report.html"


def is_taken(name: str) -> bool:
    """Returns whether a file of another kind may not have this name; names with a dot in front are of files on their
    way.

    Some file systems do not tell capitals from small letters, some drop points and blanks at the end, and a file is
    replaced by way of another one beside it.
    """
    plain = name.casefold().rstrip(". ")
    beside = plain.removesuffix(".tmp").removesuffix(".new")
    return plain.startswith((".", REFERENCE)) or beside in (*FILES, *FOLDERS, REPORT)
