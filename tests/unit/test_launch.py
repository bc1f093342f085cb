"""How a process starts, where there is no launcher."""

from __future__ import annotations

import os
import resource
import tempfile
from pathlib import Path

import pytest

from engine.runtime.launch import keep_kernels_on_this_node, open_file_warning, start

NAME = "CUBLAS_WORKSPACE_CONFIG"
"""Without it, and before torch 2.13, torch refuses the first product of a deterministic run on a GPU."""


def test_a_deterministic_run_gets_its_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "")  # so that it is as before when this ends
    monkeypatch.delenv(NAME)
    start()
    assert NAME not in os.environ
    start(deterministic=True)
    assert os.environ[NAME] == ":4096:8"
    monkeypatch.setenv(NAME, ":16:8")
    start(deterministic=True)
    assert os.environ[NAME] == ":16:8", "the user's own stays"


def test_too_few_open_files_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two connections of each rank arrive at the process that holds the store."""
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1024, 524288))
    assert open_file_warning(1) is None and open_file_warning(384) is None
    warning = open_file_warning(1024)
    assert warning is not None and "may open 1024 files" in warning and "ulimit -n 2304 before torchrun" in warning
    monkeypatch.setattr(resource, "getrlimit", lambda what: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert open_file_warning(4096) is None


def _cache(monkeypatch: pytest.MonkeyPatch, nodes: int | None, own: str | None = None) -> str | None:
    """Where Triton keeps its kernels on a rank of so many machines; None for no torchrun."""
    with monkeypatch.context() as patch:
        for name, value in {
            "TRITON_CACHE_DIR": own,
            "TORCHELASTIC_RUN_ID": None if nodes is None else "x",
            "GROUP_WORLD_SIZE": None if nodes is None else str(nodes),
        }.items():
            patch.setenv(name, value or "")
            if value is None:
                patch.delenv(name)
        keep_kernels_on_this_node()
        return os.environ.get("TRITON_CACHE_DIR")


def test_kernels_of_several_machines_are_kept_on_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert _cache(monkeypatch, None) is None and _cache(monkeypatch, 1) is None and not list(tmp_path.iterdir())
    assert _cache(monkeypatch, 2, "/own") == "/own"
    folder = tmp_path / f"rankfold-triton-{os.getuid()}"
    assert _cache(monkeypatch, 2) == str(folder) and folder.stat().st_mode & 0o777 == 0o700
    assert _cache(monkeypatch, 2) == str(folder), "a restart finds them again"


def test_kernels_are_not_taken_from_a_folder_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"rankfold-triton-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    assert _cache(monkeypatch, 2) is None
    folder.rmdir()
    (tmp_path / "planted").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "planted")
    assert _cache(monkeypatch, 2) is None
