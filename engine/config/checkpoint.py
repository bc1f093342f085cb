"""Checkpoint options: where checkpoints go, how often, and where a run resumes from."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.checks import require, require_at_least, require_positive
from engine.config.option import IGNORED, REPORTED, option

EVALUATED = "eval/"
"""Begins the names of figures of completions that are sampled in an evaluation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointOptions:
    """Checkpoint: where the run is kept, how often it is saved, and where it resumes from.

    Args:
        dir: Folder of the run; null creates a new folder runs/<time>, which a restart by torchrun finds again.
        every: Steps between checkpoints; 0 saves only at the end.
        keep: How many of the newest checkpoints to keep; 0 keeps all.
        keep_every: Steps between checkpoints that are kept for good, in addition to the newest; 0 for none.
        keep_best: Save after each evaluation that is better than all before, and keep that checkpoint in addition to
            those of checkpoint.keep; export it with rankfold convert export --step best.
        best: Figure by which checkpoint.keep_best judges: loss, the evaluation loss, or TASK/METRIC of
            evaluation.tasks, such as arc_easy/acc_norm; the task itself says whether higher is better. Where
            objective.name is grpo, loss stands for eval/reward, the mean reward of the prompts of data.validation, and
            other figures of them, such as eval/pass@1, may be named.
        asynchronous: Continue training while a checkpoint is written from a copy in host memory; false makes training
            wait. The run always waits for the last checkpoint.
        timeout: Seconds a save waits for the previous one before it is given up; rank 0 waits half as long for the
            other ranks' parts. On several ranks never more than half of train.collective_timeout.
        resume: "auto" resumes from the newest complete checkpoint in checkpoint.dir, if there is one; "none" starts
            afresh; anything else is the path of a run or checkpoint to resume from.
    """

    dir: str | None = option(None, IGNORED)
    every: int = option(0, IGNORED)
    keep: int = option(3, IGNORED)
    keep_every: int = option(0, IGNORED)
    keep_best: bool = option(False, IGNORED)
    best: str = option("loss", REPORTED)
    asynchronous: bool = option(True, IGNORED)
    timeout: float = option(300.0, IGNORED)
    resume: str = option("auto", IGNORED)

    def __post_init__(self) -> None:
        require(self.dir != "", "checkpoint.dir is empty, but a folder is expected: give one, or null for a fresh one.")
        require_at_least("checkpoint.every", self.every, 0, "use 0 to save only at the end")
        require_at_least("checkpoint.keep", self.keep, 0, "use for example 3, or 0 to keep all")
        require_at_least("checkpoint.keep_every", self.keep_every, 0, "use for example 1000, or 0 for none")
        require_positive("checkpoint.timeout", self.timeout, "use for example 300")
        require(
            self.best == "loss" or all(self.best.partition("/")),
            f"checkpoint.best is {self.best!r}, but loss, TASK/METRIC or eval/FIGURE is expected: use for "
            "example arc_easy/acc, or eval/reward of sampled completions.",
        )
        require(
            self.best == "loss" or self.keep_best,
            f"checkpoint.best is {self.best} and checkpoint.keep_best is false, so that no checkpoint would be judged: "
            "set checkpoint.keep_best to true, or remove checkpoint.best.",
        )
        require(self.resume != "", "checkpoint.resume is empty, but auto, none or a path is expected: set one of them.")

    @property
    def judges_by_validation(self) -> bool:
        """Whether an evaluation of the validation data decides which checkpoint is the best, and not tasks."""
        return self.best == "loss" or self.best.startswith(EVALUATED)

    @property
    def judged_completions(self) -> str:
        """The figure by which evaluations that sample completions are compared."""
        return self.best if self.best.startswith(EVALUATED) else f"{EVALUATED}reward"

    @property
    def best_keys(self) -> tuple[str, str]:
        """The entries of a checkpoint's record of evaluations that have the step of the best one, and its figure."""
        return ("step", "loss") if self.judges_by_validation else ("score_step", "score")

    @property
    def resume_path(self) -> str | None:
        """The path given in checkpoint.resume, or None where that is auto or none."""
        return None if self.resume in ("auto", "none") else self.resume
