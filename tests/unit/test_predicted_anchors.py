"""The page that has predictions beside published figures is what the planner says."""

from __future__ import annotations

import json

import pytest

from tests import predicted_anchors as anchors
from tests.support.sweeps import sampled

QUICK = [anchors.ANCHORS[0], anchors.ANCHORS[-1]]


def test_the_page_has_the_figures_of_the_file() -> None:
    rows = json.loads(anchors.FILE.read_text(encoding="utf-8"))["rows"]
    assert [row["configuration"] for row in rows] == [one.name for one in anchors.ANCHORS]
    assert anchors.table(rows) in anchors.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("anchor", sampled({one.name: one for one in anchors.ANCHORS}, [one.name for one in QUICK]))
def test_the_file_has_what_is_predicted(anchor: str) -> None:
    """To three digits; where a change of the planner or of a kernel moves it, write the file anew."""
    (one,) = (one for one in anchors.ANCHORS if one.name == anchor)
    rows = {row["configuration"]: row for row in json.loads(anchors.FILE.read_text(encoding="utf-8"))["rows"]}
    (found,) = anchors.rows([one])
    for column in ("slow", "likely", "fast", "GiB"):
        assert found[column] == pytest.approx(rows[anchor][column], rel=2e-3), (column, anchors.COMMAND)
    assert found["verdict"] == rows[anchor]["verdict"]


def test_verdicts_are_of_the_whole_range() -> None:
    assert [anchors._verdict(100, *ends) for ends in ((101, 200), (50, 99), (99, 101))] == ["faster", "slower", "open"]
    assert anchors._verdict(0, 1, 2) == "not published"
