"""Limits that a process sets itself before it works on a file that others wrote. The kernel enforces them.

A timer of processor time ends the process, whatever call of a library it is in. A ceiling on the address space, a
little above what it has already, makes its next allocation fail. Both cost some microseconds.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from engine.files import platforms

_STATM = Path("/proc/self/statm")
_BYTES_OF_A_THREAD = 128 << 20
"""Address space that the C library sets aside for a thread that allocates memory; most of it is never used."""


def start_limits() -> None:
    """Prepares this process: its timer ends it at once, without a core file, and it takes no part in signals that
    stop a run."""
    for number in platforms.signals("SIGPROF"):
        signal.signal(number, signal.SIG_DFL)
    for number in platforms.signals("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP"):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
    platforms.write_no_core_file()


@contextmanager
def limited(seconds: float, extra_bytes: int, *, threads: bool = False) -> Iterator[None]:
    """Limits what runs inside the block. Blocks may be nested; the inner one's limits hold in it.

    Args:
        seconds: of processor time, after which the process ends by SIGPROF.
        extra_bytes: of memory on top of what the process has; an allocation beyond fails. Only where the system
            reports how much is in use (Linux).
        threads: whether a library may start one per processor.

    Raises:
        MemoryError: by Python's own allocations; a library's may end the process.
    """
    if not hasattr(signal, "setitimer"):  # Windows, where the process that waits for this one ends it
        yield
        return
    outer = signal.setitimer(signal.ITIMER_PROF, seconds)[0]
    try:
        with _limited_memory(extra_bytes + (_BYTES_OF_A_THREAD * (os.cpu_count() or 1) if threads else 0)):
            yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, outer)


@contextmanager
def _limited_memory(extra_bytes: int) -> Iterator[None]:
    try:
        pages = int(_STATM.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError):
        yield
        return
    resource = platforms.resource
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    ceiling = pages * resource.getpagesize() + extra_bytes
    if hard != resource.RLIM_INFINITY:
        ceiling = min(ceiling, hard)
    resource.setrlimit(resource.RLIMIT_AS, (ceiling, hard))
    try:
        yield
    finally:
        with suppress(ValueError):
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
