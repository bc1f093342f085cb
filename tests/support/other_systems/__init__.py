"""Stands in for Windows and macOS: the engine's modules see what those systems have, and Python's own go on as before.

`engine` and `rankfold` get `os`, `signal`, `sys` and a few others through an import of ours, in which names are missing
and files behave as there. Processes that they start do so too, because Python imports `sitecustomize.py` of this folder
first. It shows what the engine asks for that another system lacks. It does not show what another system's own libraries
do, for which there is nothing like a machine that runs it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
VARIABLE = "RANKFOLD_TEST_SYSTEM"
WINDOWS, MACOS, LINUX = "win32", "darwin", "linux"


def run_as(system: str, *words: object, cwd: Path, timeout: float = 900) -> subprocess.CompletedProcess[str]:
    """Runs Python with these words on a system, as `sys.platform` names it."""
    environment = {
        **os.environ,
        **({} if system == LINUX else {VARIABLE: system}),
        "PYTHONPATH": f"{FOLDER}{os.pathsep}{FOLDER.parents[2]}",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, *map(str, words)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout
    )
