"""Every mistake of `planted.py` is found by its test, which passes without it.

    python -m pytest -s -m slow tests/mistakes

Each is made in a copy of the tree, and undone afterwards. The printed table has the seconds that the failing test took,
with the start of its process.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

from tests.mistakes.planted import MISTAKES, Edit, Mistake

ROOT = Path(__file__).resolve().parents[2]
_LEFT_OUT = shutil.ignore_patterns(".*", "shared", "build", "__pycache__", "*.egg-info")


def _edited(tree: Path, edit: Edit) -> str:
    """Returns a file's text with the replacement.

    Raises:
        AssertionError: the text has changed since the mistake was written down.
    """
    path = tree / edit.file
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    count = text.count(edit.find)
    assert count == 1, (
        f"{edit.file} has {count} places of the text that tests/mistakes/planted.py replaces, not one; adapt it:\n"
        f"{edit.find}"
    )
    return text.replace(edit.find, edit.replace)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_can_still_be_made(name: str) -> None:
    """Whose files have changed must be written down anew; and what replaces the text can be read."""
    mistake = MISTAKES[name]
    assert mistake.edits
    for edit in mistake.edits:
        compile(_edited(ROOT, edit), edit.file, "exec")
    files = [Path(argument.partition("::")[0]) for argument in mistake.test if argument.startswith("tests/")]
    assert len(files) == 1 and (ROOT / files[0]).exists(), mistake.test


def test_a_text_that_has_changed_is_said(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text("a = 1\n", encoding="utf-8")
    with pytest.raises(AssertionError, match="file.py has 0 places of the text that .* replaces, not one"):
        _edited(tmp_path, Edit("file.py", "b = 1", "b = 2"))


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, with what is compiled."""
    tree = tmp_path_factory.mktemp("copy") / "tree"
    shutil.copytree(ROOT, tree, ignore=_LEFT_OUT, symlinks=True)
    return tree


@cache
def _run(tree: Path, test: tuple[str, ...], mistake: str | None) -> tuple[int, str, float]:
    """Runs a test in the copy, which has the mistake; returns status, output and seconds."""
    dropped = ("PYTEST_", "TRITON_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    # files of the same size and second would be taken for the compiled ones of before
    environment |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-o",
        "timeout=1800",
        *test,
    ]
    began = time.monotonic()
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr[-2000:], time.monotonic() - began


def _made(tree: Path, mistake: Mistake) -> dict[Path, str]:
    """Makes a mistake; returns the texts of before."""
    before = {tree / edit.file: (tree / edit.file).read_text(encoding="utf-8") for edit in mistake.edits}
    for edit in mistake.edits:
        (tree / edit.file).write_text(_edited(tree, edit), encoding="utf-8")
    return before


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(copy: Path, name: str) -> None:
    mistake = MISTAKES[name]
    status, said, _ = _run(copy, mistake.test, None)
    assert status == 0, f"the test fails, or is skipped, without the mistake: {said[-3000:]}"
    assert re.search(r"\b\d+ passed", said) is not None and " skipped" not in said.splitlines()[-1], said[-500:]
    before = _made(copy, mistake)
    try:
        status, said, seconds = _run(copy, mistake.test, name)
    finally:
        for file, text in before.items():
            file.write_text(text, encoding="utf-8")
    assert status == 1, f"not found: {said[-3000:]}"
    assert re.search(mistake.said, said) is not None, f"found, but not said to be {mistake.said}: {said[-6000:]}"
    print(f"\n{name:45} {mistake.lane:16} {seconds:4.0f} s  {mistake.test[-1]}", flush=True)
