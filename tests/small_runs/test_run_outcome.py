"""What the log says at a run's end, and the report of the same run."""

from __future__ import annotations

import re

from rankfold.reporting.page import page
from rankfold.reporting.reading import read_runs
from tests.small_runs.conftest import SmallRuns


def test_log_and_report_say_the_same_of_a_run_by_epochs(run: SmallRuns) -> None:
    """Whether it is complete, and its losses."""
    said = run(train__steps=None, train__epochs=4, train__global_batch_size=1)
    (told,) = re.findall(r"^  run  +(.+)$", said, re.M)
    (loss,) = re.findall(r"^  training loss  +(.+)$", said, re.M)
    assert told == "complete, 4 epochs in 12 steps" and loss.endswith("(means of 6 steps)")
    shown = page(read_runs([run.folder]))
    assert told in shown and loss in shown
