"""The printed grid against drawings made by hand."""

from __future__ import annotations

import pytest

from engine.pipeline.costs import even_costs
from engine.pipeline.grid import grid
from engine.pipeline.schedules import make_schedule
from engine.pipeline.simulate import simulate


def drawn(name: str, virtual: int, width: int, ranks: int = 2, microbatches: int = 2, **costs: float) -> list[str]:
    schedule = make_schedule(name, ranks, virtual, microbatches)
    return grid(simulate(schedule, even_costs(schedule.num_stages, **costs)), width).split("\n")


def test_1f1b() -> None:
    assert drawn("1f1b", 1, 80) == [
        "time 0 to 6; in a cell: stage, action, micro-batch; . is idle",
        "rank 0 0F0 0F1 ....0B0 ....0B1",
        "rank 1 ....1F0 1B0 1F1 1B1 ...",
    ]


def test_longer_actions_have_longer_cells() -> None:
    """A unit of time is 4 characters. The first gradient is ready at 1.5 + 1 + 2 and arrives at 5."""
    assert drawn("1f1b", 1, 80, weight_grad=1, transfer=0.5) == [
        "time 0 to 10; in a cell: stage, action, micro-batch; . is idle",
        "rank 0 0F0 0F1 ............0B0---- ....0B1----",
        "rank 1 ......1F0 1B0---- 1F1 1B1---- .........",
    ]


def test_it_says_less_where_there_is_less_room() -> None:
    """8 times 4 characters beside 7, then 3, then 2, then whatever fits."""
    wide = drawn("interleaved", 2, 120, microbatches=8)
    assert wide[0].endswith("in a cell: action, micro-batch, small letters for every second stage of a rank; . is idle")
    assert wide[1].startswith("rank 0 F0 F1 f0 f1 F2 b0 F3 b1 ") and len(wide[1]) <= 120
    assert wide[2].endswith(" b6 f7 b7 B6 B7 ..")
    dense = drawn("interleaved", 2, 75, microbatches=8)
    assert dense[1].startswith("rank 0 F0F1f0f1F2b0F3b1") and max(map(len, dense[1:])) == 7 + 2 * 34
    letters = drawn("interleaved", 2, 74, microbatches=8)
    assert letters[0].endswith("action, small letters for odd micro-batches; . is idle")
    assert set(letters[1][7:]) <= set("FfBb.") and {len(row) for row in letters[1:]} == {74}
    exact = drawn("interleaved", 2, 7 + 34, microbatches=8)
    assert exact[1:] == [
        "rank 0 FfFfFBfbFBfbFBfbFBfbFBfbFBfb.B.bBb",
        "rank 1 .FfFBfbFBfbFBfbFBfbFBfbFBfbFBfbBb.",
    ]


@pytest.mark.parametrize("width", [40, 57, 80, 120, 200])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 1), (2, 4), (3, 5), (4, 8), (12, 40)])
def test_rows_are_never_wider(width: int, ranks: int, microbatches: int) -> None:
    for name, virtual in (("1f1b", 1), ("interleaved", 3), ("zb_v", 2)):
        for times in ({}, {"forward": 1.3, "input_grad": 0.7, "weight_grad": 0.4}):
            rows = drawn(name, virtual, width, ranks, microbatches, **times)
            assert len(rows) == ranks + 1 and all(len(row) <= width for row in rows[1:])


def test_rows_fit_in_just_what_they_need() -> None:
    """1F1B on 2 ranks with 5 micro-batches takes 12 F: 12 times 4 characters beside 7, less the last space."""
    fitting = drawn("1f1b", 1, 7 + 47, microbatches=5)
    assert fitting[0].endswith("stage, action, micro-batch; . is idle") and {len(row) for row in fitting[1:]} == {54}
    assert "stage" not in drawn("1f1b", 1, 7 + 46, microbatches=5)[0]


def test_actions_without_time_are_not_drawn() -> None:
    assert not any("W" in row for row in drawn("zb_h1", 1, 120)[1:])
