"""AGENTS.md: its run file, its commands, its statuses and its names are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import engine.api
from engine.config.load import parse_config
from engine.config.option_help import help_text, help_topic
from engine.telemetry import errors
from engine.telemetry.interrupts import EXIT_INTERRUPTED
from rankfold.starting.options import take_start_options
from tests.unit.test_docs import _command_lines

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "AGENTS.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_run_file_is_complete(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    (tmp_path / "run.yaml").write_text(block)
    config = parse_config(["--config", str(tmp_path / "run.yaml")])
    for section, options in yaml.safe_load(block).items():
        for name, value in options.items():
            assert getattr(getattr(config, section), name) == value


def test_training_commands_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    (tmp_path / "run.yaml").write_text(block)
    lines = [words for name, *words in _command_lines(PAGE) if name == "train"]
    assert len(lines) > 4
    for words in lines:
        start, others = take_start_options("train", words, {})
        assert (start is None) is ("--nproc" not in words)
        if (topic := help_topic(others)) is not None:
            assert help_text(topic)
        else:
            parse_config([word for word in others if word != "--print_config"])


def test_the_statuses_are_those_of_the_code() -> None:
    named = dict(re.findall(r"^\| (\d+) \| ([^|]+) \|$", TEXT, re.MULTILINE))
    wanted = {0: "done", errors.EXIT_DEFECT: "a defect", errors.EXIT_USER_ERROR: "a mistake"}
    wanted |= {errors.EXIT_LOST_RANK: "another rank was lost", errors.EXIT_STOPPED: "stopped by a signal"}
    wanted |= {EXIT_INTERRUPTED: "interrupted"}
    assert {int(status) for status in named} == wanted.keys()
    assert all(named[str(status)].startswith(words) for status, words in wanted.items())


def test_paths_and_names_exist() -> None:
    names = re.findall(r"`([\w./-]+)`", TEXT)
    paths = [name for name in names if "/" in name and not name.startswith(("runs/", "my-"))]
    paths += re.findall(r"^    (?:bash|\S*python -m pytest -q) (.*?)(?: +#.*)?$", TEXT, re.MULTILINE)
    assert len(paths) > 8
    assert [path for line in paths for path in line.split() if not (ROOT / path).exists()] == []
    (api,) = re.findall(r"`engine\.api` has ([^:]*?) and more", TEXT)
    assert {*re.findall(r"`(\w+)`", api)} <= {*engine.api.__all__}


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) <= 100
