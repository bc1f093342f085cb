"""Lines for the person watching: one on a terminal, plain and rate-limited elsewhere, none from other ranks."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.telemetry.format import first_to_last, format_bytes, format_columns, format_count, format_duration, how_far
from engine.telemetry.log import Log
from engine.telemetry.process_memory import peak_memory_bytes
from engine.telemetry.progress import Progress, TrainProgress
from engine.telemetry.terminal import leave_bottom

ROOT = Path(__file__).resolve().parents[2]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (5 * 2**30, "5.0 GiB"), (2**60, "1024.0 PiB")],
)
def test_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0s"), (59.4, "59s"), (59.6, "1m00s"), (185, "3m05s"), (3599.9, "1h00m"), (7620, "2h07m"), (-1, "0s")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (12, "12"), (950.4, "950"), (999.6, "1.00k"), (12345, "12.3k"), (999900, "1.00M"), (1.25e9, "1.25G")],
)
def test_counts(count: float, text: str) -> None:
    assert format_count(count) == text


def train_lines(stream: io.StringIO, steps: int, seconds: float, rank: int = 0, start: int = 0) -> str:
    clock = Clock()
    progress = TrainProgress(Log(rank, stream), start + steps, start, clock)
    for step in range(start + 1, start + steps + 1):
        clock.now += seconds
        progress.update(step=step, loss=2.0, lr=2e-4, grad_norm=0.5, tokens=1000, seconds=seconds, memory=2**20)
    progress.close()
    return stream.getvalue()


def test_plain_lines_are_at_most_one_a_second_and_end_with_the_last() -> None:
    lines = train_lines(io.StringIO(), steps=20, seconds=0.125).splitlines()
    # Steps 1, 9 and 17 are a second apart; 20 is the last.
    assert [line.split()[1] for line in lines] == ["1/20", "9/20", "17/20", "20/20"]


def test_what_the_line_says() -> None:
    line = train_lines(io.StringIO(), steps=3, seconds=2.0).splitlines()[0]
    assert line == "step 1/3  loss 2.0000  lr 0.0002  grad norm 0.5  500 tokens/s  mem 1.0 MiB  ETA 4s"


def test_time_left_after_a_resume() -> None:
    line = train_lines(io.StringIO(), steps=3, seconds=2.0, start=50).splitlines()[0]
    assert line.startswith("step 51/53 ") and line.endswith("ETA 4s")


def plain(text: str) -> list[str]:
    """What stays on a terminal, without colours: the last of each line."""
    return [re.sub(r"\x1b\[[\d;]*m", "", line).rpartition("\r\x1b[K")[2] for line in text.split("\n")]


STEP = {"step": 22, "loss": 3.4925, "lr": 0.00197, "grad_norm": 0.53, "tokens": 2790, "seconds": 1.0, "memory": 2**28}


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (30, "13%  ETA 2m18s"),
        (45, "13%  ETA 2m18s  loss 3.4925"),
        (80, "13% ━───────  ETA 2m18s  loss 3.4925  2.79k tokens/s  norm 0.53"),
        (100, "13% ━━──────────────  ETA 2m18s  loss 3.4925  2.79k tokens/s  norm 0.53  lr 0.00197"),
        (120, "13% ━━──────────────  ETA 2m18s  loss 3.4925  2.79k tokens/s  norm 0.53  lr 0.00197  mem 256.0 MiB"),
    ],
)
def test_a_step_fits_the_terminal_with_what_matters_first(
    columns: int, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures that do not fit are left out, not cut."""
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    TrainProgress(Log(0, stream), 160, 21, Clock()).update(**STEP)  # type: ignore[arg-type]
    assert plain(stream.getvalue()) == [f"step 22/160   {line}"]
    leave_bottom()


@pytest.mark.parametrize(
    ("variables", "codes"),
    [
        ({"TERM": "xterm-256color"}, {"1", "36", "90"}),
        ({"TERM": "xterm", "NO_COLOR": "1"}, {"1"}),
        ({"TERM": "dumb"}, None),
    ],
)
def test_colours_where_the_user_wants_them(
    variables: dict[str, str], codes: set[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a terminal that can rewrite a line, the line is the one of a file."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    stream = Terminal()
    TrainProgress(Log(0, stream), 160, 21, Clock()).update(**STEP)  # type: ignore[arg-type]
    if codes is None:
        assert stream.getvalue().startswith("step 22/160  loss 3.4925  lr 0.00197") and "\x1b" not in stream.getvalue()
    else:
        assert set(re.findall(r"\x1b\[(\d+)m", stream.getvalue())) - {"0"} == codes
    leave_bottom()


def test_a_long_path_leaves_room_for_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    progress = Progress(Log(0, stream), f"importing /home/{'someone/' * 20}my-model", 2**30, "bytes", Clock())
    progress.advance(2**28)
    (line,) = plain(stream.getvalue())
    assert line.startswith("importing …") and "my-model   25% ━━" in line and "256.0 MiB / 1.0 GiB" in line
    leave_bottom()


def test_log_lines_break_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    Log(0, stream).info("layout: 2 ranks, tensor 2 with sequence parallelism, data 1")
    Log(0, stream).info("  a row of a table is left as it is, whatever its width")
    Log(0, stream).info("resume with rankfold train --config run.yaml --lora.rank 8", wraps=False)
    assert stream.getvalue().splitlines() == [
        "layout: 2 ranks, tensor 2 with sequence",
        "  parallelism, data 1",
        "  a row of a table is left as it is, whatever its width",
        "resume with rankfold train --config run.yaml --lora.rank 8",
    ]


def test_a_terminal_gets_one_line_rewritten() -> None:
    text = train_lines(Terminal(), steps=5, seconds=1.0)
    assert text.count("\n") == 1 and text.endswith("\n")
    assert text.count("\r") == 5


def test_a_message_does_not_mangle_the_rewritten_line() -> None:
    stream = Terminal()
    progress = TrainProgress(Log(0, stream), 9, clock=Clock())
    progress.update(step=1, loss=2.0, lr=1.0, grad_norm=1.0, tokens=1, seconds=1.0, memory=1)
    before = plain(stream.getvalue())
    progress.info("saved")
    assert plain(stream.getvalue()) == ["saved", *before], "above the line, which is there still"
    progress.close()
    assert plain(stream.getvalue()) == ["saved", *before, ""]


def test_other_ranks_are_silent() -> None:
    stream = io.StringIO()
    assert train_lines(stream, steps=3, seconds=2.0, rank=1) == ""
    Log(1, stream).warning("x")
    assert stream.getvalue() == ""


def test_log_lines() -> None:
    stream = io.StringIO()
    Log(0, stream).info("one")
    Log(0, stream).warning("two")
    assert stream.getvalue() == "one\nwarning: two\n"


def test_bytes_with_rate_and_time_left() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(Log(0, stream), "reading", total=4 * 2**20, unit="bytes", clock=clock)
    clock.now += 0.5
    assert progress.text() == "reading: 0 B / 4.0 MiB (0%)  0 B/s"
    progress.advance(2**20)
    assert progress.text() == "reading: 1.0 MiB / 4.0 MiB (25%)  2.0 MiB/s", "half a second tells nothing yet"
    clock.now += 1.5
    assert progress.text() == "reading: 1.0 MiB / 4.0 MiB (25%)  512.0 KiB/s  ETA 6s"
    clock.now += 2.0
    progress.advance(3 * 2**20)
    progress.finish()
    progress.finish()
    assert stream.getvalue().splitlines()[-1] == "reading: 4.0 MiB / 4.0 MiB (100%)  1.0 MiB/s  took 4s"
    assert stream.getvalue().count("took") == 2  # the line that reached the end, and the last one


def test_items_without_a_total_finish_on_leaving() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(Log(0, stream), "tokenizing", unit="samples", clock=clock) as progress:
        clock.now += 4.0
        progress.advance(8)
    assert stream.getvalue().splitlines()[-1] == "tokenizing: 8 samples  2/s  took 4s"


def test_a_failure_does_not_look_finished() -> None:
    stream = io.StringIO()
    with pytest.raises(ValueError), Progress(Log(0, stream), "work", total=2, clock=Clock()):
        raise ValueError
    assert "took" not in stream.getvalue()


def test_peak_memory_is_what_the_kernel_says() -> None:
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("needs /proc")
    block = bytearray(64 << 20)
    peak = peak_memory_bytes()
    kernel = next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    assert len(block) < peak and abs(peak - kernel) < 8 << 20


def test_memory_does_not_load_torch() -> None:
    code = (
        "import sys; from engine.telemetry.process_memory import peak_memory_bytes as peak\n"
        "peak(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    rows = [("part", "of", "GiB"), ("weights", "a", "12.5")]
    assert format_columns(rows) == ["part     of   GiB", "weights   a  12.5"]
    assert format_columns(rows, names=2) == ["part     of   GiB", "weights  a   12.5"]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], ""),
        ([3.0], "3.0000"),
        ([3.0, 2.0, 1.0], "3.0000 → 1.0000"),
        ([4.0, 3.0, 2.0, 1.0], "3.5000 → 1.5000 (means of 2 steps)"),
        ([5.0] * 20 + [9.0] * 7 + [1.0] * 20, "5.0000 → 1.0000 (means of 20 steps)"),
    ],
)
def test_a_loss_from_first_to_last(values: list[float], text: str) -> None:
    assert first_to_last(list(enumerate(values, 1))) == text


@pytest.mark.parametrize(
    ("step", "epochs", "text"),
    [
        (12, None, "step 12 of 36"),
        (36, None, "complete, 36 steps"),
        (36, 1.0, "complete, 1 epoch in 36 steps"),
        (36, 1.5, "complete, 1.5 epochs in 36 steps"),
    ],
)
def test_how_far_a_run_is(step: int, epochs: float | None, text: str) -> None:
    assert how_far(step, 36, epochs) == text
