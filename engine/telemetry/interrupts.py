"""Ctrl-C in a command: the first leaves it in order, a later one ends the process at once.

While a run trains, `engine.runtime.preemption` takes the signal instead, and saves. This module does not import torch.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from engine.telemetry.ending import end_at_once

EXIT_INTERRUPTED = 128 + int(signal.SIGINT)
SAME_PRESS_SECONDS = 0.5
"""Interrupts so close to the first are the same press of Ctrl-C, which launchers forward to processes that have it from
the terminal already."""
_SWALLOWED_SECONDS = 0.05


class _Presses:
    """The Ctrl-C of this process."""

    def __init__(self) -> None:
        self.first: float | None = None
        """When it was pressed first, by the monotonic clock."""
        self.done = False
        """Whether the command has come to its end, so that nothing is left to leave in order."""
        self.tell: Callable[[], None] = lambda: None
        """Tells the user that the command was interrupted."""


_PRESSES = _Presses()


def was_interrupted() -> bool:
    """Returns whether Ctrl-C was pressed after `leave_in_order`, whatever exception it caused."""
    return _PRESSES.first is not None


def is_ignored() -> bool:
    """Returns whether this process was started to ignore Ctrl-C, as a shell starts background jobs."""
    return signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def leave_in_order(tell: Callable[[], None]) -> None:
    """From now on has the first Ctrl-C raise KeyboardInterrupt in the main thread, and a later one end the process.

    A KeyboardInterrupt that comes where nothing can be raised, such as in a finaliser, is raised once more. While a
    module is imported the first ends the process too: libraries abort where it is raised as they initialise. Does
    nothing where the signal is ignored, and outside the main thread.

    Args:
        tell: tells the user that the command was interrupted, where this module ends the process.
    """
    if threading.current_thread() is not threading.main_thread() or is_ignored():
        return
    _PRESSES.first, _PRESSES.done, _PRESSES.tell = None, False, tell
    signal.signal(signal.SIGINT, _handle)
    sys.unraisablehook = _unraisable


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Holds Ctrl-C back inside; processes that are started inside never get it, though their terminal sends it."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_at_the_next() -> None:
    """Has the next Ctrl-C end the process: the command is done."""
    _PRESSES.done = True


def _handle(number: int, frame: FrameType | None) -> None:
    if _PRESSES.done:
        end_at_once(EXIT_INTERRUPTED)
    if _PRESSES.first is None:
        _PRESSES.first = time.monotonic()
        if not _is_importing(frame):
            raise KeyboardInterrupt
        try:
            _PRESSES.tell()
        finally:
            end_at_once(EXIT_INTERRUPTED)
    if time.monotonic() - _PRESSES.first > SAME_PRESS_SECONDS:
        end_at_once(EXIT_INTERRUPTED)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _unraisable(seen: Any) -> None:
    if not issubclass(seen.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(seen)
        return
    _PRESSES.first = None
    again = threading.Timer(_SWALLOWED_SECONDS, signal.raise_signal, [signal.SIGINT])
    again.daemon = True
    again.start()
