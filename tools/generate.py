"""Continues texts with a model: `rankfold generate` as a script."""

import installed  # noqa: F401 - before what needs it

from engine.telemetry.errors import run_command
from rankfold.generate import main

if __name__ == "__main__":
    run_command(main)
