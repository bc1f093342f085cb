"""The answers that the examples' pages print are what the planner says, to the letter."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from rankfold import plan
from tests.support.sweeps import sampled

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("examples/memory/README.md", "examples/llama2_70b_one_gpu/README.md", "examples/adapter_sweep/README.md")
_ANSWER = re.compile(
    r"```console\n\$ python tools/plan\.py ((?:memory|adapters) (?:[^\n]*\\\n)*[^\n]*)\n(.*?)\n```", re.DOTALL
)
"""A command, which may go on over lines that end in a backslash, and what it prints."""


def _answers() -> list[tuple[str, str]]:
    found = [match for page in PAGES for match in _ANSWER.findall((ROOT / page).read_text(encoding="utf-8"))]
    return [(" ".join(command.replace("\\\n", " ").split()), printed) for command, printed in found]


def test_every_case_is_answered() -> None:
    commands = [command for command, _ in _answers()]
    assert [command.partition(" ")[0] for command in commands] == 9 * ["memory"] + 3 * ["adapters"]
    for case in ("--gpus 8 --gpu-memory 80", "--gpus 4 --gpu-memory 80", "--gpus 1 --gpu-memory 139"):
        assert any("llama-2-70b.json" in command and case in command for command in commands), case


SLOW = (3, 4, 5, 9, 10, 11)
"""Searches over many layouts, and traces of many tenants: a few seconds each."""


@pytest.mark.parametrize(
    "command, printed",
    sampled(_answers(), [answer for number, answer in enumerate(_answers()) if number not in SLOW]),
    ids=range(len(_answers())),
)
def test_an_answer_is_what_the_planner_prints(
    command: str, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    parser = argparse.ArgumentParser()
    name, *words = command.split()
    plan.COMMANDS[name].add_arguments(parser)
    plan.COMMANDS[name].run(parser.parse_args(words))
    assert capsys.readouterr().out.strip() == printed.strip()
