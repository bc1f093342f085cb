"""A folder with a run file."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a run file that needs neither model nor data to be checked."""
    (tmp_path / "run.yaml").write_text(
        'model: {path: /data/model}\nlora: {rank: 2}\ndata: {train: /data/"a\\b".jsonl, seq_length: 32}\n'
        "train: {global_batch_size: 16}\ncheckpoint: {dir: /data/run, every: 10}\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path
