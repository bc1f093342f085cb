"""Where training checkpoints go, how often, and what a run starts from."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.checks import require, require_at_least


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointOptions:
    """Checkpoint: where the run is kept, how often it is saved, and what it goes on from.

    Args:
        dir: Folder of the run; null makes a fresh runs/<time> folder.
        every: Steps between checkpoints; 0 saves only at the end.
        keep: How many of the newest checkpoints to keep; 0 keeps all.
        resume: "auto" goes on from the newest complete checkpoint in checkpoint.dir where there is one, "none" starts
            afresh, and anything else is the path of a run or of one of its checkpoints to go on from.
    """

    dir: str | None = None
    every: int = 0
    keep: int = 3
    resume: str = "auto"

    def __post_init__(self) -> None:
        require(self.dir != "", "checkpoint.dir is empty, but a folder is expected: give one, or null for a fresh one.")
        require_at_least("checkpoint.every", self.every, 0, "use 0 to save only at the end")
        require_at_least("checkpoint.keep", self.keep, 0, "use for example 3, or 0 to keep all")
        require(self.resume != "", "checkpoint.resume is empty, but auto, none or a path is expected: set one of them.")

    @property
    def resume_path(self) -> str | None:
        """The path given in checkpoint.resume, or None when it says auto or none."""
        return None if self.resume in ("auto", "none") else self.resume
