"""A training engine for large language models. `engine.api` is what Python programs call; the command is `rankfold`.

Importing it without torch fails with a sentence that says how to install, before any module that needs torch is read.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

__version__ = "0.1.0"

_ROOT = Path(__file__).resolve().parents[1]


def not_installed(package: str) -> str:
    """Returns the sentence for a missing dependency: what is missing where, and the line that installs it."""
    missing = f"the engine is not installed for {sys.executable}, which has no {package}: "
    if (_ROOT / "setup.py").is_file():
        return missing + (
            f"run `bash tools/setup_venv.sh` and `source .venv/bin/activate` in {_ROOT}, or `pip install -e .` there."
        )
    return missing + "run `pip check`, which lists the packages that are missing, and install those."


if find_spec("torch") is None:
    raise ImportError(not_installed("torch"), name="torch")
