"""Trains: LoRA adapters, selected parameters, or everything: `rankfold train` as a script."""

import installed  # noqa: F401 - before what needs it

from engine.telemetry.errors import run_command
from rankfold.train import main

if __name__ == "__main__":
    run_command(main)
