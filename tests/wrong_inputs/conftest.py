"""What the cases start from."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from tests.wrong_inputs.workplace import Workplace, check_refused, make_place, run_here


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    """A workplace whose run would work."""
    return make_place(tmp_path / "place")


@pytest.fixture
def refused(place: Workplace, capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Runs the training command line on the place, which must be refused with these words."""
    usual, numbers = place.options["checkpoint.dir"], count()

    def check(words: str, *, at_once: bool = True) -> None:
        if place.options["checkpoint.dir"] == usual:
            # its lock stays until the process ends, which a real command does after an error
            place.options["checkpoint.dir"] = f"{usual}-{next(numbers)}"
        try:
            check_refused(run_here("pretrain_lora", place.arguments(), capsys), words, at_once=at_once)
        finally:
            if str(place.options["checkpoint.dir"]).startswith(f"{usual}-"):
                place.options["checkpoint.dir"] = usual

    return check
