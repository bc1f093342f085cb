"""The command line that a user typed, to be shown once more."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.telemetry.torchrun import is_rank

_PROGRAMS = ("rankfold", "torchrun")


def given_command(*more: str) -> str:
    """Returns the command line that started this process, or the torchrun that did, as a shell takes it.

    Args:
        more: words to add at its end.
    """
    words: Sequence[str] = sys.orig_argv
    if is_rank(os.environ):
        try:
            words = os.fsdecode(Path(f"/proc/{os.getppid()}/cmdline").read_bytes()).split("\0")[:-1]
        except OSError:
            words = ["torchrun", "...", "-m", "rankfold", *sys.argv[0].split()[1:], *sys.argv[1:]]
    return shlex.join([*_as_typed(words), *more])


def _as_typed(words: Sequence[str]) -> Sequence[str]:
    """Returns the words without the interpreter that runs an installed program."""
    for place in (0, 1):
        if len(words) > place and (name := Path(words[place]).name) in _PROGRAMS:
            on_path = shutil.which(name)
            is_it = on_path is not None and os.path.realpath(on_path) == os.path.realpath(words[place])
            return [name if is_it else words[place], *words[place + 1 :]]
    return words
