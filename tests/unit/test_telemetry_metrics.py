"""The metrics file: exact numbers, nothing lost, resumed at the right record."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import UserError
from engine.telemetry.metrics import MetricsWriter

ROOT = Path(__file__).resolve().parents[2]


def write_steps(path: Path, first: int, last: int) -> None:
    writer = MetricsWriter(path)
    for step in range(first, last + 1):
        writer.train(step=step, loss=1 / step, grad_norm=0.1, lr=2e-4, tokens=1000, seconds=0.25, memory=1 << 30)
    writer.close()


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_training_record(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    write_steps(path, 3, 3)
    assert records(path) == [
        {
            "step": 3,
            "loss": 1 / 3,
            "grad_norm": 0.1,
            "lr": 2e-4,
            "tokens": 1000,
            "seconds": 0.25,
            "tokens_per_second": 4000.0,
            "memory": 1 << 30,
        }
    ]


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_keep_every_bit(tmp_path_factory: pytest.TempPathFactory, value: float) -> None:
    path = tmp_path_factory.mktemp("bits") / "m.jsonl"
    MetricsWriter(path).evaluation(step=1, eval_loss=value)
    assert struct.pack("d", records(path)[0]["eval_loss"]) == struct.pack("d", value)


def test_each_line_is_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    code = (
        "import os, pathlib, sys\nfrom engine.telemetry.metrics import MetricsWriter\n"
        "MetricsWriter(pathlib.Path(sys.argv[1])).evaluation(step=4, eval_loss=2.5, samples=7)\nos._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, check=False)
    assert done.returncode == 9
    assert records(path) == [{"step": 4, "eval_loss": 2.5, "samples": 7}]


def test_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    writer = MetricsWriter(path)
    for value in (math.nan, math.inf, -math.inf):
        writer.evaluation(step=1, eval_loss=value)
    read = [record["eval_loss"] for record in records(path)]
    assert read == ["NaN", "Infinity", "-Infinity"]
    assert math.isnan(float(read[0])) and float(read[2]) == -math.inf


def test_appends_and_resumes(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write_steps(path, 1, 6)
    writer = MetricsWriter(path)
    writer.evaluation(step=6, eval_loss=1.0)
    assert writer.truncate_after(4) == 3
    writer.evaluation(step=4, eval_loss=2.0)
    writer.close()
    assert [(record["step"], "loss" in record) for record in records(path)] == [
        *((1, True), (2, True), (3, True), (4, True)),
        (4, False),
    ]
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.jsonl"]


def test_a_last_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write_steps(path, 1, 2)
    with path.open("a") as file:
        file.write('{"step": 2, "eval_lo')
    writer = MetricsWriter(path)
    assert writer.truncate_after(2) == 1
    writer.evaluation(step=2, eval_loss=1.5)
    assert [record["step"] for record in records(path)] == [1, 2, 2]


def test_a_foreign_line_is_refused_and_the_file_kept(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\nnotes\n{"step": 2}\n')
    with pytest.raises(UserError, match="line 2 is not a metrics record"):
        MetricsWriter(path).truncate_after(1)
    assert path.read_text() == '{"step": 1}\nnotes\n{"step": 2}\n'


def test_no_file(tmp_path: Path) -> None:
    writer = MetricsWriter(None)
    writer.evaluation(step=1, eval_loss=1.0)
    assert writer.truncate_after(0) == 0
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written .*: change checkpoint.dir or log.metrics"):
        MetricsWriter(tmp_path / "file" / "m.jsonl")


def test_a_full_disk_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    monkeypatch.setattr("engine.telemetry.metrics.open_append", lambda path: Path("/dev/full").open("a"))  # noqa: SIM115
    metrics = MetricsWriter(tmp_path / "metrics.jsonl")
    with pytest.raises(UserError, match=r"metrics.jsonl cannot be written \(No space left on device\): make room"):
        metrics.evaluation(step=1, eval_loss=1.0)
    metrics.evaluation(step=2, eval_loss=1.0)  # nowhere, and no second sentence
    metrics.close()
