"""Ends a process: its output is flushed, and no rank waits for another.

Leaving a process group is collective: with NCCL it waits for kernels and for the other ranks. A rank that fails alone
would wait there for ranks that wait for it in a collective: a deadlock. So groups are left after success
only (`engine.runtime.launch.stop`). The interpreter's own shutdown can wait as well, for threads and exit handlers,
and threads of the C++ library may meet an interpreter that is shutting down, which sometimes aborts even a finished
process. A process that has joined others therefore ends by `os._exit`, whatever its status; one that never did ends
like any program. Nothing else in the engine or its tools ends a process or registers an exit handler.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from typing import NoReturn

from engine.telemetry.terminal import leave_bottom

_joined = threading.Event()


def joins_others() -> None:
    """Notes that this process is about to join a process group: from now on it must not wait when it ends."""
    _joined.set()


def has_joined() -> bool:
    """Returns whether this process has joined a process group."""
    return _joined.is_set()


def end(status: int) -> NoReturn:
    """Ends the process, immediately where it has joined others.

    Raises:
        SystemExit: with `status`, in a process on its own.
    """
    if has_joined():
        end_at_once(status)
    raise SystemExit(status)


def end_at_once(status: int) -> NoReturn:
    """Ends the process from any thread, whatever other threads do; the system closes open files."""
    try:
        with suppress(OSError, ValueError):
            leave_bottom()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # no reader, or closed already
                stream.flush()
    finally:
        os._exit(status)


_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Has the system kill this process when its parent is gone; does nothing where it is not Linux.

    The kernel notices whatever this process does, also where it is stopped or waits in a library.

    Args:
        parent: process id of the parent, as the process that started this one knows it.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes  # needed here alone

    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL)) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it went while this was asked for
        os.kill(os.getpid(), signal.SIGKILL)
