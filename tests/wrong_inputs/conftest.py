"""What the cases start from."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config.run_files import LOCK
from tests.wrong_inputs.workplace import Workplace, check_refused, make_place, run_here


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    """A workplace whose run would work."""
    return make_place(tmp_path / "place")


@pytest.fixture
def refused(place: Workplace, capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Runs the training command line on the place, which must be refused with these words."""

    def check(words: str, *, at_once: bool = True) -> None:
        check_refused(run_here("pretrain_lora", place.arguments(), capsys), words, at_once=at_once)
        assert not os.path.lexists(Path(place.options["checkpoint.dir"], LOCK)), "the next run would find the lock"

    return check
