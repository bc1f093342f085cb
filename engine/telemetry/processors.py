"""How many processors a process has."""

from __future__ import annotations

import os


def available_processors() -> int:
    """Returns processors that this process may use, where the system tells: inside a container fewer than the
    machine has.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
