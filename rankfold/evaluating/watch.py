"""Follows the requests of an evaluation: a line of progress with the time that is left, or places where a run stops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.telemetry.log import Log
from engine.telemetry.progress import Progress


class Watch:
    """Follows nothing; subclasses do."""

    @contextmanager
    def over(self, title: str, total: int) -> Iterator[None]:
        """Follows `total` requests of the kind that `title` names."""
        yield

    def advance(self, count: int) -> None:
        """Counts requests that have been answered."""

    def passed(self) -> None:
        """Marks a place that all ranks pass in the same order; may leave the evaluation with an exception."""

    def share(self, together: int) -> int | None:
        """Returns how many prompts are completed between two such places; None for all of them.

        Args:
            together: prompts that are completed at a time.
        """
        return None


class ShownProgress(Watch):
    """Shows a line of progress on rank 0.

    Args:
        log: where it goes.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._progress: Progress | None = None

    @contextmanager
    def over(self, title: str, total: int) -> Iterator[None]:
        with Progress(self._log, title, total, "requests") as self._progress:
            yield
        self._progress = None

    def advance(self, count: int) -> None:
        if self._progress is not None:
            self._progress.advance(count)


class RunWatch(Watch):
    """Passes the places where a run may stop.

    Args:
        check: called there; see `engine.runtime.supervision.Supervision.check`.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check

    def passed(self) -> None:
        self._check()

    def share(self, together: int) -> int:
        return 8 * together  # the last of a share leave slots unused, and a run should stop within its grace period
