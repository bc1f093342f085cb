"""Imported first by every tool: ends it with one sentence where the engine is not installed. Needs nothing itself."""

import sys
from importlib.util import find_spec
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]

if any(find_spec(name) is None for name in ("engine", "rankfold", "torch", "yaml")):
    sys.stderr.write(
        f"error: the engine is not installed for {sys.executable}: run `bash tools/setup_venv.sh` and "
        f"`source .venv/bin/activate` in {_ROOT}, or `pip install -e .` there.\n"
    )
    sys.exit(2)
