"""One process of a machine asks the hub and downloads, while the others wait for the repository's lock.

Ranks come here before they form a group that could time out. What the first of them found, a commit or a refusal, holds
for all of its launch: all read the same commit, and a refusal is not asked for again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import UserError
from engine.files.holder import process_start, this_machine
from engine.hub.cache import CachedRepo
from engine.telemetry.log import Log


def agreed(cached: CachedRepo, log: Log, question: str, work: Callable[[], str]) -> str:
    """Returns the commit that answers a question, the same on all ranks of this machine.

    Args:
        cached: the repository, which one process at a time works on.
        question: the same on all ranks.
        work: downloads what the question asks for, and returns the commit.

    Raises:
        UserError: `work` did, here or on another rank of this launch.
    """
    with cached.alone(log) as lock:
        notes = _Notes(lock, question)
        if notes.refusal is not None:
            raise UserError(notes.refusal)
        if notes.commit is not None:
            return notes.commit
        try:
            commit = work()
        except UserError as error:
            notes.leave(refusal=str(error))
            raise
        notes.leave(commit=commit)
        return commit


class _Notes:
    """What another rank of this launch has found for the same question, kept in the lock's file.

    Args:
        path: of the file, held by this process.
        question: the name and the need.
    """

    def __init__(self, path: Path, question: str) -> None:
        self._path, self._question, self._launch = path, question, _launch()
        self._notes: dict[str, Any] = {}
        if self._launch is not None:
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                found = None
            if isinstance(found, dict) and found.get("launch") == self._launch:
                self._notes = found
        answer = self._notes.get(question)
        answer = answer if isinstance(answer, dict) else {}
        self.commit: str | None = answer.get("commit")
        self.refusal: str | None = answer.get("refusal")

    def leave(self, *, commit: str | None = None, refusal: str | None = None) -> None:
        """Leaves an answer for the other ranks."""
        if self._launch is not None:
            answer = {"commit": commit, "refusal": refusal}
            text = json.dumps({**self._notes, "launch": self._launch, self._question: answer})
            self._path.write_text(text, encoding="utf-8")


def _launch() -> str | None:
    """Returns what the ranks of one start on this machine have in common; None for a process of its own."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    parent = os.getppid()
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"{this_machine()} {parent} {process_start(parent)} {start}"
