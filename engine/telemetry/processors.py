"""How many processors a process has."""

from __future__ import annotations

import os


def available_processors() -> int:
    """Those that this process may use, where the system says so: fewer than the machine has inside a container."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
