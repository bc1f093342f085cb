"""Whole runs of the training command line on a tiny model, in this process: a fraction of a second each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.wrong_inputs.workplace import Workplace, make_place, run_here


@dataclass
class SmallRuns:
    """Runs on one workplace.

    Args:
        place: its files and options, which a test may change.
    """

    place: Workplace
    capture: pytest.CaptureFixture[str]

    def __call__(self, *, status: int = 0, **options: Any) -> str:
        """Everything printed by a run with these options, written with __ for the point, beside those of the place."""
        self.place.set(**options)
        seen = run_here("pretrain_lora", self.place.arguments(), self.capture)
        assert seen.status == status, seen.printed
        assert "Traceback" not in seen.printed
        return seen.printed

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(str(self.place.options["checkpoint.dir"]))


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> SmallRuns:
    """Runs on a workplace of the test's own, which learns enough to see."""
    place = make_place(tmp_path / "place")
    place.set(data__seq_length=20, optim__lr=0.01, log__peak_tflops=0, checkpoint__dir=tmp_path / "run")
    return SmallRuns(place, capsys)


@pytest.fixture
def texts() -> list[dict[str, str]]:
    """Twelve records of unequal lengths."""
    return [{"text": " ".join(["abab", "cab", "bac", "aa bb"][index % 4 :] * (1 + index % 3))} for index in range(12)]
