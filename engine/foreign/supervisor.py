"""A process between this program and another, which ends with everything that it has started.

What another program starts may leave its session, its process group and its parent: then no signal finds it. On Linux
such orphans become children of their nearest ancestor that asked for them. The supervisor does, so that it can kill
them all when its child ends, when it is told to, and when the process that started it is gone, however that ended. On
other systems it kills its child alone; the one that started it kills their process group.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from engine.files import platforms

_PR_SET_CHILD_SUBREAPER = 36
_LOOK_SECONDS = 0.5
"""Seconds after which it looks again whether the process that started it is there."""
ENDING_SECONDS = 5.0
"""Seconds for which it kills what is left, which may start others meanwhile."""
STOPPING = platforms.signals("SIGINT", "SIGTERM", "SIGUSR1")
"""Signals that a scheduler may send to all processes of a run: they end no supervisor, but what started it."""


def serve_supervised(serve: Callable[[int, int], None], descriptor: int, lifeline: int, parent: int) -> NoReturn:
    """Runs a service in a process below this one, and ends with all that it starts; see `supervise`.

    Args:
        serve: gets the descriptor, and this process's id, with which it ends.
        descriptor: of a socket.
        lifeline, parent: as of `supervise`.
    """
    own = os.getpid()
    supervise(lambda: serve(descriptor, own), descriptors=[descriptor], lifeline=lifeline, parent=parent)


def supervise(child: Callable[[], None], *, descriptors: Sequence[int], lifeline: int, parent: int) -> NoReturn:
    """Calls `child` in a process of its own, and ends as that does, when nothing that it started is left. To be called
    in a process that has no other threads.

    Args:
        child: its process ends when it returns.
        descriptors: that are the child's, and closed here.
        lifeline: descriptor of a pipe's end for reading; when the other end is closed, everything is ended.
        parent: process id of the one that started this process.
    """
    _adopt_orphans()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in STOPPING:
        signal.signal(number, lambda number, frame: None)
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    process = os.fork()
    if process == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in (woken, wakes, lifeline):
            os.close(descriptor)
        child()
        os._exit(0)
    for descriptor in descriptors:
        os.close(descriptor)
    status = None
    while status is None and os.getppid() == parent:
        ready, _, _ = select.select([lifeline, woken], [], [], _LOOK_SECONDS)
        if lifeline in ready:
            break
        if woken in ready:
            os.read(woken, 1 << 10)
        status, _ = _reap(process)
    _end_descendants(process)
    _end_as(status)


def _adopt_orphans() -> None:
    if platforms.IS_LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _reap(process: int) -> tuple[int | None, bool]:
    """Reaps all children that have ended.

    Returns:
        The status of this one, None where it was not among them, and whether others are left.
    """
    status = None
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0] != 0:
            if found[0] == process:
                status = found[1]
    except ChildProcessError:
        return status, False
    return status, True


def _end_descendants(process: int) -> None:
    ends = time.monotonic() + ENDING_SECONDS
    are_left = _reap(process)[1]
    while are_left and time.monotonic() < ends:
        for number in _descendants(process):
            with suppress(ProcessLookupError, PermissionError):  # another user's
                os.kill(number, signal.SIGKILL)
        time.sleep(0.002)
        are_left = _reap(process)[1]


def _descendants(process: int) -> list[int]:
    """Returns the processes below this one; without /proc its child alone."""
    children: dict[int, list[int]] = {}
    for number, parent in _processes():
        children.setdefault(parent, []).append(number)
    if not children:
        return [process]
    found = [os.getpid()]
    for number in found:
        found += children.get(number, [])
    return found[1:]


def _processes() -> Iterator[tuple[int, int]]:
    """Yields each process that /proc shows with its parent."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # the name in brackets before may hold anything
            yield int(entry.parent.name), int(entry.read_bytes().rpartition(b")")[2].split()[1])


def _end_as(status: int | None) -> NoReturn:
    """Ends this process with the status of a child; killed by the same signal, where one killed that."""
    if status is not None and os.WIFSIGNALED(status):
        platforms.write_no_core_file()
        with suppress(OSError):  # those that cannot be handled
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(0 if status is None else os.WEXITSTATUS(status))
