"""Limits on time and memory for a program that comes with a model's files.

A chat template is such a program. It runs in Jinja's sandbox, which protects the system but does not stop it from
running without end or filling the memory. Here the kernel enforces limits: a timer of processor time, and a ceiling on
the address space a little above what the process has already. Both cost some microseconds per call.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SECONDS = 10.0
"""Seconds of processor time that one call may take."""

EXTRA_BYTES = 2 * 2**30
"""Bytes of memory that one call may add."""

_STATM = Path("/proc/self/statm")


class OutOfTime(BaseException):
    """Raised where the program is still running when its time is over.

    Not an Exception: Jinja swallows those of expressions that it tries to evaluate beforehand.
    """


@contextmanager
def bounded() -> Iterator[None]:
    """Limits time and memory of what runs inside the block.

    The time is limited on a process's main thread only, because only there Python handles signals; the memory where
    the system reports how much is in use (Linux).

    Raises:
        OutOfTime: it ran for too long.
        MemoryError: it asked for too much memory.
    """
    with _limited_memory(), _limited_time():
        yield


@contextmanager
def _limited_time() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise OutOfTime

    # the timer of processor time: the one of real time is the test runner's, and a suspended machine uses it up
    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def _limited_memory() -> Iterator[None]:
    try:
        import resource

        pages = int(_STATM.read_text(encoding="ascii").split()[0])
    except (ImportError, OSError, ValueError):
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    ceiling = pages * resource.getpagesize() + EXTRA_BYTES
    for limit in (soft, hard):
        if limit != resource.RLIM_INFINITY:
            ceiling = min(ceiling, limit)
    resource.setrlimit(resource.RLIMIT_AS, (ceiling, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
