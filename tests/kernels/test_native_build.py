"""Building and loading the compiled kernels: with a compiler, without one, stale, and beside torch's OpenMP."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from csrc import build
from engine.errors import UserError
from engine.kernels.native import loader
from engine.kernels.native.norm import rmsnorm_forward

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The loader looks into an empty folder."""
    monkeypatch.setattr(loader, "FOLDER", tmp_path)
    loader._load.cache_clear()
    yield tmp_path
    loader._load.cache_clear()


def test_not_built(empty_folder: Path) -> None:
    status = loader.native_status()
    assert not status.available and "not built" in status.reason and "csrc/build.py" in status.reason
    with pytest.raises(UserError, match="not built"):
        rmsnorm_forward(torch.zeros(1, 4), torch.zeros(4), 1e-5)


def test_a_file_that_is_no_library(empty_folder: Path) -> None:
    (empty_folder / f"libkernels_{loader.best_instruction_set()}.so").write_bytes(b"not a library")
    status = loader.native_status()
    assert not status.available and "cannot be loaded" in status.reason


@pytest.mark.skipif(shutil.which("c++") is None or sys.platform != "linux", reason="needs a C++ compiler on Linux")
def test_a_stale_library_is_refused(empty_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    name = build.library_name(loader.best_instruction_set())
    other = tmp_path_factory.mktemp("other") / "version.cpp"
    other.write_text('extern "C" const char* engine_source_digest() { return "other"; }\n', encoding="utf-8")
    subprocess.run(["c++", "-shared", "-fPIC", "-o", str(empty_folder / name), str(other)], check=True)
    status = loader.native_status()
    assert not status.available and "other sources" in status.reason


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match="no-such-compiler"):
        build.build(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="the kernels are built on Linux")
def test_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(build.BuildError, match="false failed with status 1"):
        build.build(tmp_path, ("baseline",))
    assert not list(tmp_path.glob("*.so"))


@pytest.mark.skipif(not loader.native_status().available, reason=loader.native_status().reason)
def test_one_openmp_runtime() -> None:
    """Torch and the kernels run threaded in one process and share the runtime."""
    code = """
import torch
from pathlib import Path
from engine.kernels.native import loader, norm
def threads(): return len(list(Path("/proc/self/task").iterdir()))
torch.set_num_threads(2)
torch.randn(512, 512) @ torch.randn(512, 512)
torch.randn(1 << 20).exp()
before = threads()
norm.rmsnorm_forward(torch.randn(64, 64), torch.ones(64), 1e-5)
print(len(loader._openmp_paths()), before, threads())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    runtimes, before, after = map(int, done.stdout.split())
    # a second runtime would start threads of its own
    assert runtimes == 1 and before == after >= 2
