"""The wheel that `pip install .` makes: what is in it, and that it works unpacked, away from the sources.

The manylinux wheel, its sdist and what auditwheel says of them are in tests/end_to_end/test_release.py.
"""

from __future__ import annotations

import configparser
import email
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from engine import __version__
from engine.checkpoint.manifest import ENGINE_VERSION
from tests.support.commands import REPOSITORY

PARTS = (
    "engine", "rankfold", "triton_kernels", "csrc", "tools", "tests", "setup.py", "pyproject.toml", "LICENSE",
    "MANIFEST.in", "README.md",
)  # fmt: skip
"""What a build could take, and what it must not."""
FOLDERS = (("triton_kernels", "engine/kernels/triton"), ("engine", "engine"), ("rankfold", "rankfold"))
"""Folder in the sources, and in the wheel."""
COMPILER = """#!/bin/sh
while [ $# -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done
echo from-the-compiler >"$out"
"""
"""Stands in for a C++ compiler, which takes a minute: writes what it is asked for."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because a build leaves folders beside setup.py."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "build", "*.egg-info")
    for name in PARTS:
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, source / name, ignore=ignored)
        else:
            shutil.copy2(REPOSITORY / name, source / name)
    compiler = source / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    pip = "-m pip wheel . --no-deps --no-build-isolation --no-index --disable-pip-version-check --quiet --wheel-dir"
    done = subprocess.run(
        [sys.executable, *pip.split(), str(out)],
        cwd=source,
        env={**os.environ, "CXX": str(compiler)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    (found,) = out.glob("*.whl")
    return found


def _metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(packed.read(name))


def test_what_is_in_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        (info,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        points = configparser.ConfigParser()
        points.read_string(packed.read(f"{info}/entry_points.txt").decode())
        tags = packed.read(f"{info}/WHEEL").decode()
        libraries = {name: packed.read(name) for name in names if name.endswith(".so")}
    assert "\nTag: py3-none-linux_" in tags, "the libraries are one machine's, and of no one Python"
    assert "engine/kernels/native/libkernels_baseline.so" in libraries
    assert set(libraries.values()) == {b"from-the-compiler\n"}
    assert {name.partition("/")[0] for name in names} == {"engine", "rankfold", info}
    assert dict(points["console_scripts"]) == {"rankfold": "rankfold.__main__:run"}
    assert info == f"rankfold-{__version__}.dist-info"
    for folder, place in FOLDERS:
        sources = {
            path.relative_to(REPOSITORY / folder).as_posix()
            for path in (REPOSITORY / folder).rglob("*")
            if path.is_file() and path.suffix not in (".md", ".so", ".pyc")
        }
        packed_sources = {name.removeprefix(f"{place}/") for name in names if name.startswith(f"{place}/")}
        assert sources <= packed_sources, sources - packed_sources
    assert "engine/kernels/triton/lora.py" in names and "rankfold/quickstarting/lora.yaml" in names


def test_what_it_says_of_itself(wheel: Path) -> None:
    metadata = _metadata(wheel)
    assert metadata["Version"] == __version__ and metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "# Rankfold" in metadata.get_payload()
    requirements = metadata.get_all("Requires-Dist", [])
    of = {
        extra: {one.partition(";")[0].strip() for one in requirements if f'extra == "{extra}"' in one}
        for extra in metadata.get_all("Provides-Extra", [])
    }
    assert of["train"] == {"peft"}
    assert of["all"] == set().union(*(of[extra] for extra in of.keys() - {"all", "docs", "release", "test"}))
    assert {"peft", "starlette", "wandb"} <= of["all"] and "pytest" not in of["all"]


def test_the_install_page_names_all_extras(wheel: Path) -> None:
    page = (REPOSITORY / "docs" / "install.md").read_text(encoding="utf-8")
    table = page[page.index("## Extras") : page.index("## An sdist")]
    named = {name for row in re.findall(r"^\| (`.+?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert named == set(_metadata(wheel).get_all("Provides-Extra", []))


def test_checkpoints_record_the_same_version() -> None:
    assert __version__ == ENGINE_VERSION


def test_it_works_unpacked(wheel: Path, tmp_path: Path) -> None:
    """The kernels lie elsewhere in it than in the sources."""
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path / "installed")
    (tmp_path / "elsewhere").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path / "elsewhere",
            env=environment,
            capture_output=True,
            text=True,
            timeout=110,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert run("-m", "rankfold", "--version") == f"rankfold {__version__}"
    pytest.importorskip("triton")
    code = "import engine.kernels.triton.launch as launch, engine.kernels.triton.lora as lora; "
    found = run("-c", code + "print(launch.__file__); print(lora.__file__)").splitlines()
    assert found == [str(tmp_path / "installed" / f"engine/kernels/triton/{name}.py") for name in ("launch", "lora")]
