"""Evaluation options: tasks of lm-evaluation-harness that score the model while it trains."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.checks import require, require_at_least
from engine.config.option import IGNORED, REPORTED, option


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationOptions:
    """Evaluation: tasks of lm-evaluation-harness that score the model while it trains.

    Args:
        tasks: Names of tasks, groups or tags, or paths of YAML files, evaluated at the start, at the end and every
            evaluation.every steps; empty for none.
        every: Steps between evaluations of the tasks; 0 for none between the start and the end.
        limit: Documents of each task, from the first; null takes all.
        num_fewshot: Examples before each question; null takes those of each task.
        apply_chat_template: Write prompts as conversations, with the chat template of the run.
        include_path: Folder of tasks of your own, beside those of the harness.
        batch: Completions generated at the same time, for tasks that generate text.
        allow_code: Allow tasks that run code which the model wrote, on this machine.
    """

    tasks: tuple[str, ...] = option((), REPORTED)
    every: int = option(0, REPORTED)
    limit: int | None = option(None, REPORTED)
    num_fewshot: int | None = option(None, REPORTED)
    apply_chat_template: bool = option(False, REPORTED)
    include_path: str | None = option(None, IGNORED)
    batch: int = option(16, IGNORED)
    allow_code: bool = option(False, IGNORED)

    def __post_init__(self) -> None:
        require(
            not isinstance(self.tasks, str) and all(self.tasks),
            f"evaluation.tasks is {self.tasks!r}, but a list of names is expected: write for example [arc_easy].",
        )
        require_at_least("evaluation.every", self.every, 0, "use 0 to evaluate only at the start and the end")
        require_at_least("evaluation.limit", self.limit, 1, "use null for all documents")
        require_at_least("evaluation.num_fewshot", self.num_fewshot, 0, "use null for those of each task")
        require_at_least("evaluation.batch", self.batch, 1, "use for example 16")
        require(
            self.include_path != "",
            "evaluation.include_path is empty, but a folder is expected: give one, or null for none.",
        )
