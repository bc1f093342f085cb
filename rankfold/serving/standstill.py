"""Why no command is executed at present, such as on a full disk, and the wait until commands are executed again."""

from __future__ import annotations

import threading

from engine.telemetry.output import say

_SECONDS = 1.0
"""Between two looks at whether it continues."""


class Ended(Exception):
    """The server ends, and nothing is waited for any more."""


class Standstill:
    """What the server waits for; used by the thread that executes commands, and read by others."""

    def __init__(self) -> None:
        self._sentence: str | None = None
        self._ends = threading.Event()

    @property
    def sentence(self) -> str | None:
        """What is waited for; None where nothing is."""
        return self._sentence

    def wait(self, sentence: str) -> None:
        """Says what is waited for, once, and waits a while.

        Raises:
            Ended: the server ends.
        """
        if self._sentence is None:
            say(f"commands wait: {sentence}")
        self._sentence = sentence
        if self._ends.wait(_SECONDS):
            raise Ended

    def over(self) -> None:
        """Notes that it continues."""
        if self._sentence is not None:
            say("commands are executed again.")
        self._sentence = None

    def end(self) -> None:
        """Has every wait end."""
        self._ends.set()
