"""Secrets that this process was given in its environment, kept from the processes that it starts.

Other processes of the same user can read the environment that a process began with, whatever it does to its variables,
and its memory. So a secret is overwritten where it came in, and on Linux the process is closed to all but root: it
leaves no core, and no debugger or profiler of another process attaches to it. The processes above this one, torchrun
and shells, keep their copies.
"""

from __future__ import annotations

import ctypes
import os
import sys

from engine.errors import UserError

_PR_SET_DUMPABLE = 4
_taken: dict[str, str] = {}


def take_secret(name: str) -> None:
    """Takes a variable out of the environment of this process; from now on `secret` alone has it. Does nothing where it
    is not set.

    Raises:
        UserError: it has characters that no header of HTTP carries. The sentence has none of them.
    """
    value = os.environ.get(name)
    if value is None:
        return
    library = ctypes.CDLL(None)
    library.getenv.restype = ctypes.c_void_p
    place = library.getenv(os.fsencode(name))
    if place is not None:
        ctypes.memset(place, 0, len(os.fsencode(value)))
    del os.environ[name]
    if sys.platform.startswith("linux"):
        library.prctl(_PR_SET_DUMPABLE, 0)
    if not all(" " < character < "\x7f" for character in value.strip()):
        raise UserError(f"{name} has spaces or characters that are not ASCII, which no API key has: correct it.")
    _taken[name] = value.strip()


def secret(name: str) -> str | None:
    """Returns the secret that `take_secret` took; None where the variable was not set, or empty."""
    return _taken.get(name) or None
