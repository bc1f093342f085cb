"""The commands of the guides: each is listed in commands.yaml with how it is executed, and those that run here do.

`python -m pytest -m slow tests/docs_site/test_commands.py -k docs/chat.md` executes the commands of one page.
"""

from __future__ import annotations

import ast
import datetime
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs_site.guides import ROOT, commands, guides
from tests.docs_site.workplace import execute, free_port, make_image_place, make_text_place, write_programs

LISTED: dict[str, list[dict[str, Any]]] = yaml.safe_load((ROOT / "tests/docs_site/commands.yaml").read_text("utf-8"))
WAYS = ("prints", "test", "by_hand", "cannot")
DETAILS = {"place", "makes", "given", "until", "status", "copies", "after", "removes", "cold", "instead"}
LIMIT = 300
"""Seconds for a command; a few are expected."""


def test_every_command_is_listed_and_no_other() -> None:
    """In the order of the page, so that the list can be read beside it."""
    for page in guides():
        assert [entry["do"] for entry in LISTED.get(page, [])] == commands(page), page
    assert LISTED.keys() <= {*guides()}


@pytest.mark.parametrize("page", LISTED)
def test_each_has_one_way_of_being_executed(page: str) -> None:
    for entry in LISTED[page]:
        (way,) = [way for way in WAYS if way in entry]
        assert entry.keys() - {"do", way} <= (DETAILS if way == "prints" else set()), entry["do"]
        assert all(words in entry["do"] for words in entry.get("instead", {})), entry["do"]
        if way == "by_hand":
            assert isinstance(entry[way]["date"], datetime.date) and entry[way]["printed"], entry["do"]
        else:
            assert isinstance(entry[way], str) and entry[way], entry["do"]


@pytest.mark.parametrize("named", sorted({one["test"] for page in LISTED.values() for one in page if "test" in one}))
def test_tests_that_are_named_exist(named: str) -> None:
    file, _, name = named.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert name in functions if name else any(one.startswith("test_") for one in functions)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of which each command has a copy."""
    top = tmp_path_factory.mktemp("places")
    made = {"text": make_text_place, "images": make_image_place}
    for name, make in made.items():
        (top / name).mkdir()
        make(top / name)
    return {name: top / name for name in made}


def _executed() -> list[Any]:
    """Each command that is executed here once, though pages share some."""
    found = {}
    for page, entries in LISTED.items():
        for entry in entries:
            if "prints" in entry:
                found.setdefault(repr(sorted(entry.items())), pytest.param(entry, id=f"{page}: {entry['do'][:70]}"))
    return [*found.values()]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(LIMIT * 3)
@pytest.mark.parametrize("entry", _executed())
def test_a_command_does_what_its_page_says(entry: dict[str, Any], places: dict[str, Path], tmp_path: Path) -> None:
    folder, programs = tmp_path / "place", tmp_path / "programs"
    write_programs(programs, cold=entry.get("cold", False))
    shutil.copytree(places[entry.get("place", "text")], folder, symlinks=True)
    for target, source in entry.get("copies", {}).items():
        shutil.copy(folder / source, folder / target)
    for name in entry.get("removes", ()):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for command in entry.get("after", ()):
        before = execute(command, folder, programs=programs, limit=LIMIT)
        assert before.status == 0, before.printed
    command = entry["do"]
    for words, others in entry.get("instead", {}).items():
        command = command.replace(words, others.replace("PORT", str(free_port())))
    ended = execute(
        command, folder, given=entry.get("given", ""), until=entry.get("until"), programs=programs, limit=LIMIT
    )
    # 130 where Ctrl-C comes before the command has taken over how it ends
    assert ended.status in ((0, 130) if "until" in entry else (entry.get("status", 0),)), ended.printed
    assert re.search(entry["prints"], ended.printed), ended.printed
    assert not re.search(r"Traceback", ended.printed), ended.printed
    assert "makes" not in entry or (folder / entry["makes"]).exists(), ended.printed
