"""The time that something may take as a whole, however many waits it consists of."""

from __future__ import annotations

import time

_LONGEST_WAIT = 2e6
"""Seconds that a system call can wait for: poll(2) counts milliseconds in 31 bits, which is 24 days."""


class Deadline:
    """A moment that is some seconds ahead when this is made.

    Args:
        seconds: until then.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self._ends = seconds, time.monotonic() + seconds

    def left(self) -> float:
        """Returns the seconds that are left, more than 0, and no more than a system call can wait for.

        Raises:
            TimeoutError: no time is left.
        """
        left = self._ends - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"it took more than {self.seconds:g} s")
        return min(left, _LONGEST_WAIT)

    def extend(self, seconds: float) -> None:
        """Puts the moment off."""
        self._ends += seconds

    def has(self, seconds: float) -> bool:
        """Returns whether more than so many seconds are left."""
        return self._ends - time.monotonic() > seconds
