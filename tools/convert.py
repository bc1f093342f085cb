"""Converts checkpoints and configurations: `rankfold convert` as a script."""

import installed  # noqa: F401 - before what needs it

from engine.telemetry.errors import run_command
from rankfold.convert import main

if __name__ == "__main__":
    run_command(main)
