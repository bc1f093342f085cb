"""Ctrl-C on a terminal while a command works: one line, status 130, and the same command continues."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from tests.faults.ranks import run_environment
from tests.support.terminal import OnTerminal

pytestmark = pytest.mark.timeout(200)


def test_preprocess_with_workers(tmp_path: Path, stories_dir: Path) -> None:
    """The terminal sends Ctrl-C to the workers too, as they import and as they work."""
    record = json.dumps({"text": "once upon a time there was a small bug " * 80})
    (tmp_path / "data.jsonl").write_text((record + "\n") * 9000)
    command = [sys.executable, "-m", "rankfold", "preprocess", "--tokenizer", stories_dir, "--workers", "2"]
    command += ["--out", "store", "data.jsonl"]
    for moment in (1.0, "ETA "):
        with OnTerminal(command, run_environment(), tmp_path) as run:
            if isinstance(moment, str):
                run.wait_for(moment)
            else:
                while not (tmp_path / ".store.partial").exists():
                    time.sleep(0.05)
                time.sleep(moment)
            run.press()
            assert run.wait(20) == 130
        assert run.output.rstrip().endswith("interrupted") and "Traceback" not in run.output, run.output
        assert not (tmp_path / "store").exists()
