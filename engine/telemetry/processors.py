"""The processors of a process, and whether others use them."""

from __future__ import annotations

import os


def available_processors() -> int:
    """Returns the number of processors that this process may use: inside a container fewer than the machine
    has.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_BUSY = 1.5
"""Programs that want a processor, for each that there is, above which threads that wait are in the others' way."""


def busy_note(threads: int) -> str | None:
    """Returns a sentence where other programs keep the processors busy, so that threads which spin while they wait for
    each other make a step many times as long; None where that is not so, or the user has chosen how they wait.

    Args:
        threads: that share the work of an operation.
    """
    if threads == 1 or not hasattr(os, "getloadavg") or "OMP_WAIT_POLICY" in os.environ:
        return None
    load, processors = os.getloadavg()[0], available_processors()
    if load <= _BUSY * processors or "GOMP_SPINCOUNT" in os.environ:
        return None
    return (
        f"other programs keep the {processors} processors busy (load {load:.1f}), and threads that wait for each other "
        "take part in that: OMP_WAIT_POLICY=PASSIVE or OMP_NUM_THREADS=1 in the environment may be many times as fast"
    )
