"""Tokenises data once into a store: `rankfold preprocess` as a script."""

import installed  # noqa: F401 - before what needs it

from engine.telemetry.errors import run_command
from rankfold.preprocess import main

if __name__ == "__main__":
    run_command(main)
