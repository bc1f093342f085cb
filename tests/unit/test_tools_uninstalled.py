"""A tool that is run by an interpreter without the engine says how to install it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import REPOSITORY

TOOLS = sorted(path.stem for path in (REPOSITORY / "tools").glob("*.py") if path.stem != "installed")


@pytest.mark.parametrize("tool", TOOLS)
def test_one_sentence(tool: str, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ended = subprocess.run(  # -S: without what is installed
        [sys.executable, "-S", str(REPOSITORY / "tools" / f"{tool}.py"), "--help"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.startswith("error: the engine is not installed for ") and ended.stderr.count("\n") == 1
    assert "`bash tools/setup_venv.sh` and `source .venv/bin/activate`" in ended.stderr
