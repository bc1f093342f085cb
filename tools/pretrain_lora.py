"""Trains: LoRA adapters, selected parameters, or everything: `rankfold train` as a script."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, installed or not

if __name__ == "__main__":
    from rankfold.__main__ import run

    run("train")
