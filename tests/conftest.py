"""What all tests share: a quiet environment, where the data lies, and which tests are left out unless asked for."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.shared_data import DATA
from tests.support.sweeps import takes_slow
from tests.support.warm_workers import keep_cold, warm_workers

try:
    from hypothesis import settings
except ImportError:  # the tests for a GPU run without it, and images with one often lack it
    pass
else:
    # The same examples in each run, so that a failure is the change's and not the day's.
    settings.register_profile("repeatable", derandomize=True, deadline=None)
    settings.load_profile("repeatable")

# Before torch or tokenizers are imported, because they read these once. Tests start many processes, so more threads
# than one in each would fight for the cores, and nothing may be downloaded.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"


warm_workers()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests out unless -m speaks of them, and skip GPU tests where there is none."""
    if not takes_slow(config):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in set(slow)]
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_gpu():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start workers of tokenizers as the test has them."""
    keep_cold(item.get_closest_marker("cold_workers") is not None)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of real weights, tokenizers and texts: ENGINE_TEST_DATA, or shared/data beside the repository."""
    if not DATA.is_dir():
        pytest.skip(f"no test data in {DATA}: set ENGINE_TEST_DATA to the folder that has it")
    return DATA


@pytest.fixture(scope="session")
def stories_dir(data_dir: Path) -> Path:
    """A small trained Llama as a Hugging Face folder."""
    folder = data_dir / "weights" / "stories260K" / "hf"
    if not folder.is_dir():
        pytest.skip(f"no model in {folder}")
    return folder


@pytest.fixture
def no_secrets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has taken no secrets, and is open to its user's other processes again when the test has ended."""
    monkeypatch.setattr("engine.runtime.secrets._taken", {})
    yield
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE
