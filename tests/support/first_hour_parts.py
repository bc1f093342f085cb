"""Runs the first hour with two parts more: python -m tests.support.first_hour_parts FOLDER OUT [PART ...] ...

`broken` is refused by its tool. `endless` is of two tests in FOLDER, of which one fails, and one waits after it has
written FOLDER/waits.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from engine.telemetry.errors import run_command
from rankfold.benchmarking.first_hour import run as first_hour
from rankfold.benchmarking.first_hour.parts import PARTS, Part

_TESTS = """\
import pathlib, time
def test_fails(): assert 0
def test_waits():
    pathlib.Path({waits!r}).touch()
    time.sleep(600)
"""


def main(folder: Path) -> None:
    """Runs the first hour with all parts and those of this module."""
    file = folder / "test_endless.py"
    file.write_text(_TESTS.format(waits=str(folder / "waits")), encoding="utf-8")
    parts = (
        *(replace(part, seconds=4 * part.seconds) for part in PARTS),  # other tests may run beside
        Part("broken", "step", early=True, on_cpu="--hidden 63 --device cpu"),
        Part("endless", "tests", early=True, on_cpu=f"-c /dev/null {file}", seconds=10.0),
    )
    first_hour.chosen_parts = partial(first_hour.chosen_parts, parts=parts)
    first_hour.main()


if __name__ == "__main__":
    FOLDER = Path(sys.argv.pop(1))
    run_command(lambda: main(FOLDER))
