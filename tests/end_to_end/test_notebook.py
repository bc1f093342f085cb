"""The notebook of the documentation: its cells run as a program outside the checkout, and its outputs are of a run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import REPOSITORY

NOTEBOOK: dict[str, Any] = json.loads((REPOSITORY / "docs" / "notebook.ipynb").read_text("utf-8"))
CELLS: list[dict[str, Any]] = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
SHORTER = {
    r'"steps": \d+': '"steps": 4',
    r"run\.step\(\d+\)": "run.step()",
    r"range\([45]\)": "range(3)",
    r'"global_batch_size": 144': '"global_batch_size": 48',
}


def _program() -> str:
    return "\n\n".join("".join(cell["source"]) for cell in CELLS)


def _printed(cell: dict[str, Any], name: str = "stdout") -> str:
    return "".join("".join(output["text"]) for output in cell["outputs"] if output.get("name") == name)


def _run(program: str, folder: Path) -> str:
    (folder / "program.py").write_text(program, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "program.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=110
    )
    assert ended.returncode == 0, ended.stderr
    assert not (folder / "rankfold-notebook").exists(), "it tidies up"
    return ended.stdout


def test_its_outputs_are_of_one_run() -> None:
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))
    assert not [output for cell in CELLS for output in cell["outputs"] if output["output_type"] == "error"]
    text = json.dumps(NOTEBOOK)
    assert "site-packages" not in text and "Warning" not in text
    assert "right answers: 11% before, 100% after\nPEFT answers the same: True" in "".join(map(_printed, CELLS))
    assert "run: 150 steps, folder rankfold-notebook/adapter-run" in _printed(CELLS[5], "stderr")


def test_its_cells_run(tmp_path: Path) -> None:
    """With fewer steps: everything works, and PEFT's answers are those of the adapter, whatever that has learned."""
    program = _program()
    for pattern, shorter in SHORTER.items():
        program, count = re.subn(pattern, shorter, program)
        assert count, pattern
    printed = _run(program, tmp_path)
    assert "PEFT answers the same: True" in printed and "step 3: mean reward" in printed


@pytest.mark.slow
def test_it_learns(tmp_path: Path) -> None:
    printed = _run(_program(), tmp_path)
    shares = [(int(before), int(after)) for before, after in re.findall(r"(\d+)% before, (\d+)% after", printed)]
    assert len(shares) == 2 and shares[0][1] == 100, printed
    assert all(before < 30 and after > 70 for before, after in shares), printed
