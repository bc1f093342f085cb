"""Writes a page about a run, or several beside each other: `rankfold report` as a script."""

import installed  # noqa: F401 - before what needs it

from engine.telemetry.errors import run_command
from rankfold.report import main

if __name__ == "__main__":
    run_command(main)
