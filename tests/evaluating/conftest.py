"""A tiny model and tasks that the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.evaluating.small_tasks import write_model, write_tasks


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("evaluating") / "model")


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("evaluating") / "tasks")
