"""Log options: the reports of a run, and where they go."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.checks import require, require_at_least, require_not_negative
from engine.config.option import IGNORED, option
from engine.config.run_files import is_taken


@dataclass(frozen=True, kw_only=True, slots=True)
class LogOptions:
    """Log: the reports of the run, and where they go.

    Args:
        every: Steps between reports, on the terminal and in the metrics file.
        metrics: Name of the JSON-lines metrics file inside the run's folder; null writes none.
        tensorboard: Also write TensorBoard event files into the run's folder (needs the tensorboard extra).
        wandb_project: Weights & Biases project that the figures are also sent to (needs the wandb extra); set
            WANDB_MODE=offline if there is no connection. null switches it off.
        mlflow_experiment: MLflow experiment that the figures are also sent to (needs the mlflow extra), at
            MLFLOW_TRACKING_URI or else in the run's folder. null switches it off.
        communication: Measure the bytes and the time of each kind of collective, without waiting for the device; each
            rank writes them into its file in the run folder's telemetry/.
        profile_steps: Steps, counted from 1, for which torch's profiler writes a trace into the run folder's traces/,
            for chrome://tracing or Perfetto; neighbouring steps share one trace.
        peak_tflops: Peak TFLOP/s of one device, for utilisation (mfu); null measures a matrix product at the start, and
            0 reports no utilisation.
    """

    every: int = option(1, IGNORED)
    metrics: str | None = option("metrics.jsonl", IGNORED)
    tensorboard: bool = option(False, IGNORED)
    wandb_project: str | None = option(None, IGNORED)
    mlflow_experiment: str | None = option(None, IGNORED)
    communication: bool = option(False, IGNORED)
    profile_steps: tuple[int, ...] = option((), IGNORED)
    peak_tflops: float | None = option(None, IGNORED)

    def __post_init__(self) -> None:
        require_at_least("log.every", self.every, 1, "use 1 to report each step")
        require(
            self.metrics is None or (self.metrics not in ("", ".", "..") and "/" not in self.metrics),
            f"log.metrics is {self.metrics!r}, but a file name inside the run's folder is expected: "
            "use for example metrics.jsonl, or null for none.",
        )
        require(
            self.metrics is None or not is_taken(self.metrics),
            f"log.metrics is {self.metrics!r}, a name that the run's folder needs for something else: use for example "
            "metrics.jsonl, or null for none.",
        )
        for name, value in (("wandb_project", self.wandb_project), ("mlflow_experiment", self.mlflow_experiment)):
            require(value != "", f"log.{name} is empty, but a name is expected: give one, or null for none.")
        for step in self.profile_steps:
            require_at_least("log.profile_steps", step, 1, "steps are counted from 1")
        require_not_negative("log.peak_tflops", self.peak_tflops, "use null to measure it")
