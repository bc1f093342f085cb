"""A local hub that this process's huggingface_hub asks, with a cache of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub.local_hub import LocalHub, local_hub
from tests.wrong_inputs.workplace import Workplace, make_place


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A hub without repositories; nobody is logged in."""
    from huggingface_hub import constants

    with local_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", hub.address)  # of its functions, which PEFT calls
        template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        yield hub


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    """A tiny model, tokenizer, data and adapter."""
    return make_place(tmp_path / "place")


def files_of(folder: Path) -> dict[str, bytes]:
    """The content of a folder's files, for a repository."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}
