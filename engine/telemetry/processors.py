"""The number of processors of a process."""

from __future__ import annotations

import os


def available_processors() -> int:
    """Returns the number of processors that this process may use: inside a container fewer than the machine
    has.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
