"""The server of a tiny model on which recipes run; files with other servers have fixtures of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.cookbook import NAME, make_work
from tests.serving.running import RunningServer


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a model and data."""
    folder: Path = tmp_path_factory.mktemp("work")
    make_work(folder)
    return folder


@pytest.fixture(scope="module")
def server(work: Path) -> Iterator[RunningServer]:
    """A server of its model."""
    running = RunningServer(work / NAME, work / "state", "--name", NAME)
    yield running
    running.kill()
