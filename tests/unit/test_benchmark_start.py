"""The section `start` of the benchmark: which moment is timed, and that its sides compute the same."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("peft", reason="the section compares with PEFT")

from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.errors import UserError
from rankfold.__main__ import COMMANDS
from rankfold.benchmarking import start, start_script
from rankfold.benchmarking.sections import StartOptions
from rankfold.benchmarking.start import Start

TINY = StartOptions(hidden=32, layers=1, records=3, ranks=1, repeats=1)
LOSS = re.compile(r"loss ([\d.]+)")


def test_the_first_step_is_timed_and_not_the_end() -> None:
    program = "import time; print('loss 7.5', flush=True); time.sleep(0.5); print('loss 1', flush=True)"
    begin = time.perf_counter()
    found = start._start(["-c", program], LOSS)
    whole = time.perf_counter() - begin
    assert found.loss == 7.5 and 0 < found.seconds < whole - 0.4
    assert start._start(["-c", program], None).seconds > 0.5


def test_processor_time_is_that_of_the_command() -> None:
    work = "import time\nwhile time.process_time() < 0.3: pass\nprint('loss 1')"
    assert start._start(["-c", work], LOSS).processor > 0.25


@pytest.mark.parametrize("program", ["raise SystemExit('no such model')", "print('no such model')"])
def test_a_command_that_takes_no_step_is_told(program: str) -> None:
    with pytest.raises(UserError, match="no such model"):
        start._start(["-c", program], LOSS)


def test_the_script_has_the_loss_of_the_model_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Factors B are zero before the first step."""
    start.write_model(tmp_path, TINY)
    start_script.main(tmp_path)
    printed = LOSS.search(capsys.readouterr().out)
    assert printed is not None
    record = json.loads((tmp_path / "train.jsonl").read_text(encoding="utf-8").splitlines()[0])
    ids = AutoTokenizer.from_pretrained(tmp_path)(record["text"])["input_ids"]
    row = torch.tensor([[*ids, 1]])
    assert row.shape == (1, 201)
    logits = AutoModelForCausalLM.from_pretrained(tmp_path)(row).logits
    expected = torch.nn.functional.cross_entropy(logits[0, :-1], row[0, 1:])
    assert float(printed.group(1)) == pytest.approx(expected.item(), abs=1e-5)


def test_sides_that_compute_something_else_are_refused() -> None:
    same = {("a", 1): [Start(1.0, 1.0, 6.93121)], ("b", 1): [Start(1.0, 1.0, 6.9312)]}
    assert start._check(same) == pytest.approx(1e-5)
    with pytest.raises(UserError, match=r"something else: losses of the first steps from 6\.92 to 6\.93121"):
        start._check({**same, ("c", 1): [Start(1.0, 1.0, 6.92)]})


def test_sizes_that_heads_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match="--hidden is 40: give a multiple of 16"):
        StartOptions(hidden=40)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_start_section() -> None:
    report = start.run(TINY)
    trainings, helps = report.tables
    assert [row[0] for row in trainings.rows] == ["rankfold train, 1 process", "transformers + PEFT, 1 process"]
    assert [row[0] for row in helps.rows][1:] == [f"rankfold {name} --help" for name in COMMANDS]
    assert "the losses of the first steps agree to" in report.findings[0]
    json.loads(report.json("the command"))
