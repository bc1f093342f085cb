"""Which checkpoint a run resumes from: rank 0 decides for all, and nobody starts from another one."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from engine.checkpoint.manifest import MANIFEST
from engine.config.checkpoint import CheckpointOptions
from engine.errors import UserError
from engine.runtime import run_folder
from engine.runtime.launch import Launch
from engine.runtime.run_folder import RunFolder


def _second_rank(folder: Path, monkeypatch: pytest.MonkeyPatch, heard: tuple[str | None, str | None]) -> RunFolder:
    """Rank 1 of a run in `folder` whose rank 0 says `heard`, and which is refused a look of its own."""

    def look(path: Path) -> Path:
        raise AssertionError(f"looked into {path}")

    monkeypatch.setattr(run_folder, "latest_checkpoint", look)
    monkeypatch.setattr(run_folder, "broadcast_object", lambda value: heard)
    launch = Launch(rank=1, world_size=2, device=torch.device("cpu"))
    return RunFolder(CheckpointOptions(dir=str(folder)), launch)


def _checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text("{}", encoding="utf-8")
    return folder


def test_other_ranks_take_rank_0_at_its_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _checkpoint(tmp_path / "newer")
    older = _checkpoint(tmp_path / "older")
    assert _second_rank(tmp_path, monkeypatch, (str(older), None)).resume_path() == older
    assert _second_rank(tmp_path, monkeypatch, (None, None)).resume_path() is None


def test_a_refusal_of_rank_0_is_everybodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="^a sentence$"):
        _second_rank(tmp_path, monkeypatch, (None, "a sentence")).resume_path()


def test_a_checkpoint_may_appear_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = tmp_path / "late"
    appears = threading.Timer(0.5, _checkpoint, [late])
    folder = _second_rank(tmp_path, monkeypatch, (str(late), None))
    appears.start()
    assert folder.resume_path() == late
    appears.join()


def test_a_checkpoint_that_never_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "SECONDS_TO_BE_SEEN", 0.1)
    folder = _second_rank(tmp_path, monkeypatch, (str(tmp_path / "elsewhere"), None))
    with pytest.raises(UserError, match=r"rank 0 resumes from .*elsewhere, which is not there for this rank"):
        folder.resume_path()
