"""Reward functions of the Python program that trains, which are called in its own process.

They are called and checked as those of files are, in threads, so that one that hangs costs its completions alone. Two
things only a process of its own can do: end a function that hangs, whose thread is left behind, and survive one that
ends or corrupts its process.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from engine.rollouts.rewards.worker import scored, with_its_columns
from engine.rollouts.user_process import CallFailed


class ProgramFunction:
    """A reward function of this program. One call at a time.

    Args:
        function: of the program.
        columns: of the prompts.
        timeout: seconds that a call may take.
    """

    def __init__(self, function: Callable[..., Any], columns: Sequence[str], timeout: float) -> None:
        self._function, self._columns, self._timeout = function, columns, timeout
        self.lock = threading.Lock()
        """To be held around calls."""
        self.call_seconds = 0.0
        """Seconds that all calls took."""

    def problem(self) -> str | None:
        """Returns why it cannot be called; None where it can."""
        try:
            with_its_columns(self._function, self._columns)
        except (TypeError, ValueError) as error:  # some callables have no signature
            return str(error)
        return None

    def call(self, request: dict[str, Any]) -> list[float | str | None]:
        """Calls the function; see `engine.rollouts.rewards.worker.serve` for the request.

        Returns:
            The reward of each completion, None, or a sentence on its flaw.

        Raises:
            CallFailed: it gave no rewards.
        """
        copied = json.loads(json.dumps(request))  # the function may change what it is given, as one in a process may
        replies: list[dict[str, Any]] = []
        function = with_its_columns(self._function, self._columns)
        thread = threading.Thread(
            target=lambda: replies.append(scored(function, copied)), name="reward function", daemon=True
        )
        began = time.monotonic()
        thread.start()
        thread.join(self._timeout)
        self.call_seconds += time.monotonic() - began
        if not replies:
            raise CallFailed(f"it did not come to an end within {self._timeout:g} s", hung=True)
        if (problem := replies[0].get("problem")) is not None:
            raise CallFailed(str(problem))
        rewards: list[float | str | None] = replies[0]["rewards"]
        return rewards
