"""Starts the processes in which tokenizers and chat templates work as forks of `warm_python`.

Each imports for half a second of a processor, and most tests that read text start one. The first few start as they do
for users, so that the server, which imports for longer, is there only where it pays. A test marked `cold_workers` has
them all from Python: one of their limits, their ends and what they import.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from socket import socket
from typing import IO

from engine.foreign import limited_process
from engine.foreign.connected import start_connected
from tests.support.warm_python import warm_python

_FIRST = 12
"""Workers that start from Python where no server is needed for anything else."""


class _Starts:
    """How the workers of this process start."""

    cold = False
    number = 0
    program: str | None = None


def keep_cold(cold: bool) -> None:
    """Starts the following workers from Python, or not."""
    _Starts.cold = cold


def warm_workers(program: str | None = None) -> None:
    """Starts this process's workers so, by the program that another process has where one is given."""
    _Starts.program = program
    limited_process.start_connected = _start


def warm_program() -> str | None:
    """The program by which workers start now, for the ranks that this process starts; None for Python."""
    if _Starts.cold or not (warm_python.cache_info().currsize or _Starts.number > _FIRST):
        return None
    return str(warm_python())


def _start(
    command: Sequence[str], errors: IO[bytes], environment: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], socket]:
    _Starts.number += 1
    program = _Starts.program or warm_program()
    return start_connected([program or command[0], *command[1:]], errors, environment)
