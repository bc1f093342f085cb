"""The time that something may take as a whole, however many waits it consists of."""

from __future__ import annotations

import time


class Deadline:
    """A moment that is some seconds ahead when this is made.

    Args:
        seconds: until then.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self._ends = seconds, time.monotonic() + seconds

    def left(self) -> float:
        """Returns the seconds that are left, more than 0.

        Raises:
            TimeoutError: none are.
        """
        left = self._ends - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"it took more than {self.seconds:g} s")
        return left

    def has(self, seconds: float) -> bool:
        """Returns whether more than so many seconds are left."""
        return self._ends - time.monotonic() > seconds
