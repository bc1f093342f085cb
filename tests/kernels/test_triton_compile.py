"""Every kernel compiles for a Hopper GPU, without a warning, within its registers and shared memory. Needs no GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.launches import refuse_none_in_tuples

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).resolve().parents[2]
SHARED_MEMORY = 227 * 1024
"""Bytes a block may have on a Hopper GPU."""
SPILLED = 16
"""Bytes of stack a thread may use: the assembler spills two registers of a small kernel to fit more of its threads."""


OTHERS = ["float32", "float16", "folded:8", "folded:16", "folded:64", "all"]


def _compiled(*names: str, cache: Path | None = None, packages: Path | None = None) -> list[dict[str, object]]:
    """What `tests.kernels.compiling` prints, from a process that does not interpret.

    Args:
        cache: where Triton keeps what it compiles; its own folder where None.
        packages: a folder whose packages stand before the installed ones.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if cache is not None:
        environment["TRITON_CACHE_DIR"] = str(cache)
    if packages is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(packages), environment.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "tests.kernels.compiling", *names]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def _kernels_defined() -> set[str]:
    """Names of all kernels that have a launcher: those called _..._kernel."""
    found = set()
    for path in (ROOT / "triton_kernels").glob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("def _") and "_kernel(" in line:
                found.add(f"engine.kernels.triton.{path.stem}.{line[4 : line.index('(')]}")
    return found


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, object]], Path]:
    """The bf16 kernels, and the cache that they were compiled into; it was empty before."""
    cache = tmp_path_factory.mktemp("cache")
    return _compiled("bfloat16", cache=cache), cache


@pytest.mark.timeout(600)
def test_bf16_kernels_compile_and_do_not_spill(cold: tuple[list[dict[str, object]], Path]) -> None:
    compiled, _ = cold
    assert {line["kernel"] for line in compiled} == _kernels_defined()
    assert [line for line in compiled if line["stack"] > SPILLED] == []
    assert [line for line in compiled if line["shared"] > SHARED_MEMORY] == []


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of each file, which change where one is written again."""
    stats = {str(path.relative_to(folder)): path.stat() for path in folder.rglob("*") if path.is_file()}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


@pytest.mark.timeout(600)
def test_a_second_process_compiles_nothing(cold: tuple[list[dict[str, object]], Path]) -> None:
    """Every kernel, with every option that its launcher gives it, is found in a warm cache."""
    first, cache = cold
    files = _files(cache)
    kernels = {str(line["kernel"]).rpartition(".")[2] for line in first}
    assert {Path(name).stem for name in files if name.endswith(".cubin")} == kernels
    assert _compiled("bfloat16", cache=cache) == first
    assert _files(cache) == files, "something was compiled again"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", OTHERS)
def test_other_dtypes_and_sizes_compile(name: str) -> None:
    compiled = _compiled(name)
    assert compiled
    assert [line for line in compiled if line["shared"] > SHARED_MEMORY] == []


@pytest.fixture(scope="module")
def oldest_triton(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the oldest Triton that setup.py allows, which is the one that the oldest torch brings."""
    version = re.search(r'"triton>=([\d.]+);', (ROOT / "setup.py").read_text(encoding="utf-8"))
    assert version is not None
    folder = tmp_path_factory.mktemp("triton")
    install = ["pip", "install", "--quiet", "--no-deps", "--target", str(folder), f"triton=={version[1]}.*"]
    done = subprocess.run([sys.executable, "-m", *install], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"cannot install triton {version[1]}: {done.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["bfloat16", *OTHERS])
def test_the_oldest_triton_compiles_everything(name: str, oldest_triton: Path, tmp_path: Path) -> None:
    compiled = _compiled(name, cache=tmp_path, packages=oldest_triton)
    if name == "bfloat16":
        assert {line["kernel"] for line in compiled} == _kernels_defined()
        assert [line for line in compiled if line["stack"] > SPILLED] == []
    assert compiled
    assert [line for line in compiled if line["shared"] > SHARED_MEMORY] == []


@pytest.mark.parametrize("arguments", [((1, None),), (2, (3, (4, None)))])
def test_none_inside_a_tuple_is_refused_by_every_version(arguments: tuple[object, ...]) -> None:
    """The newest Triton compiles it, so the rule is held where kernels are launched and compiled in tests."""
    with pytest.raises(AssertionError, match="kernel is a tuple with None inside"):
        refuse_none_in_tuples("kernel", arguments)
    refuse_none_in_tuples("kernel", (None, (1, (2, 3)), ()))
