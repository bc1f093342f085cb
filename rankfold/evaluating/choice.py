"""Which tasks are evaluated, and how: the same for a command and for a run. Needs no package of the harness."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskChoice:
    """A choice of tasks.

    Args:
        tasks: names of tasks, groups or tags, with * and ? for several, or paths of YAML files.
        include_path: folder of tasks beside those of the harness.
        limit: documents of each task, from the first; below 1 their share; None for all.
        num_fewshot: examples before each question; None for those of each task.
        apply_chat_template: whether prompts are conversations.
        system: a message before each prompt; None for none.
        gen_kwargs: generation settings that replace those of the tasks.
        seed: of the choice of examples.
        allow_code: whether tasks may run code that the model wrote.
        download: whether data sets may be fetched from the hub.

    Raises:
        UserError: a value out of its range.
    """

    tasks: tuple[str, ...]
    include_path: Path | None = None
    limit: float | None = None
    num_fewshot: int | None = None
    apply_chat_template: bool = False
    system: str | None = None
    gen_kwargs: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 1234
    allow_code: bool = False
    download: bool = False

    def __post_init__(self) -> None:
        if not self.tasks or not all(self.tasks):
            raise UserError(
                "evaluation.tasks names no task: give names with a comma between them, such as arc_easy,gsm8k."
            )
        if self.limit is not None and not (0 < self.limit < 1 or self.limit == int(self.limit) >= 1):
            raise UserError(
                f"evaluation.limit is {self.limit:g}, but a number of documents, or a share below 1, was expected: use "
                "for example 100."
            )
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise UserError(f"evaluation.num_fewshot is {self.num_fewshot}, but at least 0 was expected: change it.")
        if self.include_path is not None and not self.include_path.is_dir():
            raise UserError(
                f"evaluation.include_path {self.include_path} is not a folder: give the one that has the tasks' YAML "
                "files."
            )
