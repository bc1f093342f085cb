"""The blocks of the guides that are no commands: run files load, records are read, Python runs."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.api import load_config
from engine.tenants.sweep_file import read_sweep
from tests.docs_site.guides import Block, block_with, blocks, guides

LANGUAGES = {None, "", "bash", "json", "python", "yaml"}
FRAGMENTS = {
    ("docs/evaluation.md", "evaluation: {tasks:"): "sections beside those of a run file",
    ("docs/hub.md", "data:"): "sections beside those of a run file",
}
"""Page and first words of YAML blocks that are a part of a run file."""
NO_RUN_FILES = {
    ("docs/evaluation.md", "# my_tasks/capitals.yaml"): "a task of the harness; test_commands.py evaluates it",
    ("docs/serving.md", "scrape_configs:"): "Prometheus reads it",
}
EXECUTED = {"docs/python.md": "tests/unit/test_api.py::test_the_guide executes all blocks, one after the other"}
"""Pages whose Python blocks another test executes."""


def _of(*languages: str) -> list[Any]:
    found = [block for page in guides() for block in blocks(page) if block.language in languages]
    return [pytest.param(block, id=f"{block.page}:{block.line}") for block in found]


def _is_in(block: Block, table: dict[tuple[str, str], str]) -> bool:
    return any(block.page == page and block.text.startswith(words) for page, words in table)


def test_every_block_names_a_language_that_is_tested() -> None:
    """One without a name is what a command prints."""
    for page in guides():
        for block in blocks(page):
            assert block.language in LANGUAGES, (page, block.line)


def test_parts_that_are_named_exist() -> None:
    for page, words in FRAGMENTS | NO_RUN_FILES:
        assert block_with(page, words).startswith(words)


@pytest.mark.parametrize("block", _of("yaml"))
def test_a_run_file_loads(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = yaml.safe_load(block.text)
    if _is_in(block, NO_RUN_FILES):
        return
    _prepare(tmp_path, monkeypatch)
    if _is_in(block, FRAGMENTS):
        given = yaml.safe_load(block_with("README.md", "# run.yaml")) | given
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(given), encoding="utf-8")
    if "adapters" in given:
        assert len(read_sweep(["--config", "run.yaml"]).entries) == len(given["adapters"])
    else:
        config = load_config("run.yaml")
        assert all(getattr(config, section) is not None for section in given)


def _prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a folder the current one, with what run files name in it; names on the hub are left as they are."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("engine.api.configuration.with_snapshots", lambda config: config)
    for name in ("my-model", "MiniCPM-V-2", "my_tasks", "org/model"):
        (folder / name).mkdir(parents=True)
    for name in ("train.jsonl", "valid.jsonl", "train.json", "prompts.jsonl", "local.jsonl"):
        (folder / name).write_text("{}\n", encoding="utf-8")
    (folder / "rewards.py").write_text(block_with("docs/rollouts.md", "def accuracy("), encoding="utf-8")


@pytest.mark.parametrize("block", _of("json"))
def test_records_are_json(block: Block) -> None:
    """One record behind the other, over as many lines as the page has room for."""
    text, count = block.text.strip(), 0
    while text:
        record, end = json.JSONDecoder().raw_decode(text)
        assert isinstance(record, dict) and record
        text, count = text[end:].lstrip(), count + 1
    assert count


@pytest.mark.parametrize("block", _of("python"))
def test_python_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ast.parse(block.text)
    if block.page in EXECUTED:
        return
    _prepare(tmp_path, monkeypatch)
    program: dict[str, Any] = {}
    exec(compile(block.text, block.page, "exec"), program)
    assert program.keys() - {"__builtins__"}
