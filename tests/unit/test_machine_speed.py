"""The section that measures a machine's speeds: what it writes for the planner."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.planning.machine import MEASURED_SPEEDS
from rankfold.benchmarking import machine_speed
from rankfold.benchmarking.ceilings import COPY, PRODUCT, Ceilings
from rankfold.benchmarking.machine_speed import FP8, IN_A_ROW, SHORTEST
from rankfold.benchmarking.sections import SpeedOptions
from rankfold.planning.memory_question import read_speeds


def test_speeds_of_measured_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds are those of products in a row where they were taken, whose power is limited, and FP8 by as much."""
    ceilings = Ceilings.__new__(Ceilings)
    ceilings.moved, ceilings.operations = int(2e9), int(1e12)
    seconds = {COPY: 1e-3, PRODUCT: 1e-3, SHORTEST: 200e-6, IN_A_ROW: 200 * 1.25e-3, FP8: 0.5e-3}
    found = machine_speed._speeds(seconds, ceilings)
    assert found == pytest.approx({"copies": 2000, "products": 800, "launch": 2e-6, "products_fp8": 1600})
    del seconds[IN_A_ROW], seconds[FP8]
    assert machine_speed._speeds(seconds, ceilings)["products"] == pytest.approx(1000)
    assert found.keys() <= set(MEASURED_SPEEDS)


def test_the_planner_reads_what_the_section_writes(tmp_path: Path) -> None:
    table = machine_speed.run(SpeedOptions(copy_mib=1, size=64, repeats=1, warmup=0, device="cpu"))
    record = json.loads(table.json("rankfold benchmark machine-speed"))
    file = tmp_path / "speeds.json"
    file.write_text(json.dumps(record | {"device": "cuda"}))  # those of a CPU are refused
    assert read_speeds(str(file)) == record["speeds"] and record["speeds"].keys() >= {"copies", "products", "launch"}
