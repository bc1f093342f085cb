"""A rank that is killed, hangs or never comes: the others end in time, with one sentence and without tracebacks."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine.telemetry.errors import EXIT_LOST_RANK
from tests.faults.ranks import End, Ranks, run_settings
from tests.support.sweeps import sampled

pytestmark = pytest.mark.distributed

AMPLE = 60.0
"""Seconds of collective timeout that no test waits for."""
SHORT = 8.0
SLACK = 10.0
"""Seconds that a busy machine may take on top to end a process."""

LAYOUTS: dict[str, dict[str, object]] = {
    "tensor": {"parallel.tensor": 2},
    "data": {},
    "pipeline": {"parallel.pipeline": 2},
    "context": {"parallel.context": 2},
}
WAITS = {
    "tensor": r"(all_gather|reduce_scatter|all_reduce) on axis tp",
    "data": "all_reduce on axis dp_cp",
    "pipeline": r"(receive|send|receive and send|all_reduce) on axis pp",
    "context": r"((receive|send|receive and send) on axis cp|all_reduce on axis dp_cp)",
}
LOST = {"tensor": 1, "data": 0, "pipeline": 1, "context": 0}
"""Rank 0 also holds the store at which the ranks met."""

STUCK = ("tensor", "pipeline")
"""Where a hang is tried too: with collectives, and with transfers between two ranks."""


def _survivors(
    folder: Path, settings: dict[str, object], layouts: Iterable[str], fault: signal.Signals, timeout: float
) -> dict[str, End]:
    """How the other rank ends in each of `layouts`, which run side by side."""
    with ExitStack() as stack:
        runs = {}
        for layout in layouts:
            options = {**settings, **LAYOUTS[layout], "train.collective_timeout": timeout}
            runs[layout] = stack.enter_context(Ranks(folder / layout, options, 2))
        for run in runs.values():
            run.wait_for_step(3)
        times = {layout: run.send(LOST[layout], fault) for layout, run in runs.items()}
        ends = {}
        for layout, run in runs.items():
            other = 1 - LOST[layout]
            ends[layout] = run.ends([other], times[layout], SHORT + SLACK)[other]
        return ends


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, stories_dir: Path, data_dir: Path) -> dict[str, object]:
    return run_settings(tmp_path_factory.mktemp("data"), stories_dir, data_dir)


@pytest.fixture(scope="module")
def after_stop(settings: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> dict[str, End]:
    """Side by side, because most of the time is waiting."""
    return _survivors(tmp_path_factory.mktemp("stop"), settings, STUCK, signal.SIGSTOP, SHORT)


def _check_sentence(end: End, layout: str, words: str) -> None:
    """One sentence: the last finished step, who, in what, for whom, what the backend says and what to do."""
    assert end.status == EXIT_LOST_RANK, end
    assert "Traceback" not in end.output and "terminate called" not in end.output
    assert len(end.errors) == 1, end.output
    pattern = (
        rf"error: after step (\d+), rank {1 - LOST[layout]} lost rank {LOST[layout]} in {WAITS[layout]} "
        rf"for engine\.[\w.]+ \(.+\); {words}.*\."
    )
    found = re.fullmatch(pattern, end.errors[0])
    assert found, end.errors[0]
    assert int(found[1]) >= 2


@pytest.mark.parametrize("layout", sampled(LAYOUTS, [*LAYOUTS][1:3]))
def test_killed_rank(layout: str, settings: dict[str, object], tmp_path: Path) -> None:
    end = _survivors(tmp_path, settings, [layout], signal.SIGKILL, AMPLE)[layout]
    _check_sentence(end, layout, "a process has ended")
    assert end.seconds < SLACK


@pytest.mark.parametrize("layout", STUCK)
def test_stuck_rank(layout: str, after_stop: dict[str, End]) -> None:
    _check_sentence(after_stop[layout], layout, "there was no answer for 8 s")
    # a transfer that was under way when the rank stopped has begun a little earlier
    assert SHORT - 2 < after_stop[layout].seconds < SHORT + SLACK


def test_of_many_ranks_one_speaks(settings: dict[str, object], tmp_path: Path) -> None:
    """Rank 3 is killed: its neighbours lose it, rank 0 loses its neighbours."""
    options = {**settings, "parallel.tensor": 2, "parallel.pipeline": 2, "train.collective_timeout": AMPLE}
    with Ranks(tmp_path, options, 4) as ranks:
        ranks.wait_for_step(2)
        ends = ranks.ends(range(3), ranks.send(3, signal.SIGKILL), SHORT + SLACK)
    assert [end.status for end in ends.values()] == [EXIT_LOST_RANK] * 3, ends
    assert sum(len(end.errors) for end in ends.values()) == 1
    assert not any("Traceback" in end.output for end in ends.values())


def test_rank_that_never_comes(settings: dict[str, object], tmp_path: Path) -> None:
    with Ranks(tmp_path, {**settings, "train.collective_timeout": 3}, 2, missing=(1,)) as ranks:
        end = ranks.ends([0], ranks.started, 60)[0]
    assert end.status == EXIT_LOST_RANK, end
    assert len(end.errors) == 1 and "Traceback" not in end.output
    start = "error: before the first step, this rank did not find the others in joining the process group"
    assert end.errors[0].startswith(start) and "there was no answer for 3 s" in end.errors[0], end.errors


def test_the_rank_that_knows_the_reason_speaks(settings: dict[str, object], tmp_path: Path) -> None:
    """Rank 1 alone finds a record that cannot be used; rank 0 loses it, and leaves the word to it."""
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "whole"}\n{"text": "br', encoding="utf-8")
    options = {**settings, "parallel.tensor": 2, "train.collective_timeout": AMPLE}
    with Ranks(tmp_path, options, 2, own={1: {"data.train": broken}}) as ranks:
        ends = ranks.ends(range(2), ranks.started, AMPLE)
    assert [end.status for end in ends.values()] == [EXIT_LOST_RANK, 2], ends
    assert [len(end.errors) for end in ends.values()] == [0, 1], ends
    assert "broken.jsonl" in ends[1].errors[0] and not any("Traceback" in end.output for end in ends.values())
