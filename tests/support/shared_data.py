"""Where the real weights, tokenizers and texts of the tests lie, and parts of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("ENGINE_TEST_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
"""ENGINE_TEST_DATA, or shared/data beside the repository; it need not be there. Tests take the fixture `data_dir`."""


def shared(name: str) -> Path:
    """A file or folder of it, or the test is skipped: for what takes no fixture."""
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is absent; set ENGINE_TEST_DATA to the folder with the shared data")
    return path


def write_plays(path: Path, data_dir: Path, characters: int) -> Path:
    """The first so many characters of Shakespeare's plays as a file of text at `path`, which is returned."""
    whole = (data_dir / "corpus" / "tinyshakespeare.txt").read_text(encoding="utf-8")
    path.write_text(whole[:characters], encoding="utf-8")
    return path


def settings_on_plays(folder: Path, stories_dir: Path, data_dir: Path, characters: int) -> dict[str, object]:
    """Returns options that have the small trained Llama learn a text of another kind, which is written to `folder`; all
    but steps and batches."""
    text = write_plays(folder / "text.txt", data_dir, characters)
    return {
        "model.path": stories_dir, "data.train": text, "data.seq_length": 128, "data.packing": "true",
        "optim.lr": 3e-3, "optim.warmup_steps": 3, "lora.rank": 8, "log.every": 1,
    }  # fmt: skip
