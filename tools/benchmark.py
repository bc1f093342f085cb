"""Measures the engine against its peers and the machine's limit: `rankfold benchmark` as a script."""

import installed  # noqa: F401 - before what needs it

from engine.telemetry.errors import run_command
from rankfold.benchmark import main

if __name__ == "__main__":
    run_command(main)
