"""What a run reports while it goes on, and where."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.checks import require, require_at_least


@dataclass(frozen=True, kw_only=True, slots=True)
class LogOptions:
    """Log: what the run reports, and where.

    Args:
        every: Steps between reports, on the terminal and in the metrics file.
        metrics: Name of the JSON-lines metrics file inside the run's folder; null writes none.
        tensorboard: Write TensorBoard event files into the run's folder as well (needs the tensorboard extra).
    """

    every: int = 1
    metrics: str | None = "metrics.jsonl"
    tensorboard: bool = False

    def __post_init__(self) -> None:
        require_at_least("log.every", self.every, 1, "use 1 to report each step")
        require(
            self.metrics is None or (self.metrics not in ("", ".", "..") and "/" not in self.metrics),
            f"log.metrics is {self.metrics!r}, but a file name inside the run's folder is expected: "
            "use for example metrics.jsonl, or null for none.",
        )
