"""A command that is run by an interpreter without what the engine needs says how to install it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rankfold.__main__ import REQUIRED
from tests.support.commands import REPOSITORY

TOOLS = sorted(path.stem for path in (REPOSITORY / "tools").glob("*.py"))
COMMANDS = [*([str(REPOSITORY / "tools" / f"{tool}.py"), "--help"] for tool in TOOLS), ["-m", "rankfold", "--version"]]
COMMANDS += [["-m", "rankfold", "train", "--help"]]


def _without_packages(words: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(  # -S: without what is installed
        [sys.executable, "-S", *words],
        cwd=folder,
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(Path(word).name for word in words))
def test_one_sentence(words: list[str], tmp_path: Path) -> None:
    here = {"PYTHONPATH": str(REPOSITORY)} if words[0] == "-m" else {}
    ended = _without_packages(words, tmp_path, **here)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.startswith("error: the engine is not installed for ") and ended.stderr.count("\n") == 1
    assert "which has no torch: run `bash tools/setup_venv.sh` and `source .venv/bin/activate`" in ended.stderr


def test_the_first_hour_says_so_too(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    command = ["bash", str(REPOSITORY / "tools" / "gpu_first_hour.sh"), "out", "--dry-run"]
    environment = {**os.environ, "PYTHON": str(python)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and ended.stderr.startswith("error: the engine is not installed for ")
    assert ended.stderr.count("\n") == 1


def test_an_import_says_so_too(tmp_path: Path) -> None:
    ended = _without_packages(["-c", "import engine.api"], tmp_path, PYTHONPATH=str(REPOSITORY))
    last = ended.stderr.splitlines()[-1]
    assert ended.returncode == 1 and last.startswith("ImportError: the engine is not installed for "), ended.stderr


def test_a_package_without_a_checkout_does_not_speak_of_one(tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "engine", tmp_path / "engine", ignore=shutil.ignore_patterns("*.so"))
    ended = _without_packages(["-c", "import engine"], tmp_path)
    assert "setup_venv" not in ended.stderr and "`pip check`" in ended.stderr.splitlines()[-1]


@pytest.mark.parametrize("package", ["yaml", "jsonargparse"])
def test_another_package_that_is_missing(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; sys.argv = ['rankfold', 'train']; "
    code += "from rankfold.__main__ import run; run()"
    ended = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and f", which has no {package}: " in ended.stderr, ended.stderr
    assert ended.stderr.startswith("error: the engine is not installed for ") and ended.stderr.count("\n") == 1


def test_what_is_required_is_what_setup_requires() -> None:
    text = (REPOSITORY / "setup.py").read_text("utf-8").partition("install_requires=[")[2].partition("]")[0]
    names = {re.split(r"[^\w-]", line)[0] for line in re.findall(r'"(.+?)"', text)}
    named = {"yaml": "PyYAML", "docstring_parser": "docstring-parser", "PIL": "pillow"}
    assert {named.get(name, name) for name in REQUIRED} == names


def test_a_tracker_that_is_missing_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    """In the milliseconds that options take."""
    (tmp_path / "data.txt").write_text("text")
    code = (
        "import sys, engine.telemetry.trackers as trackers\n"
        "trackers._is_installed = lambda package: package != 'wandb'\n"
        "from rankfold.train import main\n"
        "try:\n    main()\nexcept ValueError as error:\n    print(error, 'torch' in sys.modules)\n"
    )
    options = ["--model.path", str(tmp_path), "--data.train", str(tmp_path / "data.txt"), "--log.wandb_project", "mine"]
    done = subprocess.run(
        [sys.executable, "-c", code, *options], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith("log.wandb_project is mine, but the wandb package is not installed"), done
    assert done.stdout.endswith(" False\n")
