"""The scripts of the MLPerf example refuse what is missing before they start anything."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.commands import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "mlperf_llama2_70b_lora"
NOT_INSTALLED = "is not installed: run `bash tools/setup_venv.sh mlperf`."


def refused(script: str, *arguments: str, place: Path, **environment: str) -> str:
    """What a script says, where only a Python without packages can be had and nothing but a refusal is expected."""
    ended = subprocess.run(
        ["bash", str(EXAMPLE / script), *arguments],
        cwd=place, env={**os.environ, "PYTHON": "false", **environment}, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert ended.returncode == 2 and ended.stdout == "", ended
    return ended.stderr


def test_the_small_job_wants_the_package_first(tmp_path: Path) -> None:
    assert NOT_INSTALLED in refused("run_small.sh", "out", place=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("missing", "words"), [("MODEL", "not a folder"), ("DATA", "missing"), ("", NOT_INSTALLED)])
def test_a_timed_run_wants_its_inputs_first(missing: str, words: str, tmp_path: Path) -> None:
    for name in ("train", "validation"):
        (tmp_path / f"{name}.jsonl").touch()
    given = {"MODEL": str(tmp_path), "DATA": str(tmp_path), "ORG": "o", "PLATFORM": "p", missing or "SEED": "nowhere"}
    said = refused("run_and_time.sh", "result_0.txt", place=tmp_path, **given)
    assert words in said and "RESULT" not in said
