"""The log: plain lines for the user, from one rank only."""

from __future__ import annotations

import sys
from typing import TextIO

from engine.telemetry.output import say
from engine.telemetry.terminal import is_terminal, wrapped


class Log:
    """Prints on rank 0 and stays silent elsewhere.

    Args:
        rank: this process's rank in the run.
        stream: where lines go; None takes the current standard error stream, which leaves stdout to results.
        prefix: before each line, of one of several runs that share the stream; no line is rewritten there.
    """

    def __init__(self, rank: int = 0, stream: TextIO | None = None, *, prefix: str = "") -> None:
        self._enabled = rank == 0
        self._stream, self._prefix = stream, prefix

    @property
    def enabled(self) -> bool:
        """Whether this rank prints."""
        return self._enabled

    @property
    def stream(self) -> TextIO:
        """Where lines go."""
        return sys.stderr if self._stream is None else self._stream

    @property
    def live(self) -> bool:
        """Whether the stream is a terminal on which a line can be rewritten."""
        return self._enabled and not self._prefix and is_terminal(self.stream)

    def info(self, message: str, *, wraps: bool = True) -> None:
        """Prints one line.

        Args:
            wraps: a terminal too narrow for the line breaks it between words; false for text that users copy.
        """
        if self._enabled:
            message = self._prefix + message
            say(wrapped(message, self.stream) if wraps and self.live else message, self._stream)

    def warning(self, message: str) -> None:
        """Prints one line as a warning."""
        self.info(f"warning: {message}")
