"""The documentation: links lead somewhere, and what is named exists."""

from __future__ import annotations

import json
import re
import shlex
from argparse import ArgumentParser
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from engine.config.option_names import option_types, sections
from rankfold.__main__ import COMMANDS
from rankfold.benchmarking.sections import SECTIONS

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_FLAG = re.compile(r"--([a-z_]+)\.([a-z_0-9]+)")
_NAMED = re.compile(r"`([a-z]+)\.([a-z_0-9]+)(?::[^`]*)?`")
_COMMAND = re.compile(r"(?:`|^ {4}|-m )rankfold ([a-z]+)", re.MULTILINE)
_SCRIPT = re.compile(r"\b((?:tools|examples|tests|csrc)/[\w./*\[\]!{},-]+\.(?:py|sh|sbatch|yaml|json))\b")
_SECTION = re.compile(r"rankfold benchmark ([a-z-]+)")
_ENDINGS = ("py", "yaml")
_LINE = re.compile(r"^(?: {4}|\$ )((?:rankfold|torchrun|python tools/)(?:[^\n]*\\\n)*[^\n]*)", re.MULTILINE)
"""A command in a block of its own, which may go on over lines that end in a backslash."""
_INLINE = re.compile(r"`((?:rankfold|python tools/)[^`\n]+)`")
_PARSERS: dict[str, Callable[[], ArgumentParser]] = {
    name: import_module(f"rankfold.{name}").build_parser for name in COMMANDS if name not in ("train", "launch")
}
"""Of the commands that take no options of a run."""


def _pages() -> list[Path]:
    """Every page of the checkout, but what runs and environments have written into it."""
    folders = ("docs", "examples", "engine", "rankfold", "tests", "tools", "triton_kernels", "csrc")
    found = [page for folder in folders for page in (ROOT / folder).rglob("*.md") if "out" not in page.parts]
    return sorted([*ROOT.glob("*.md"), *found])


def _of_users() -> list[Path]:
    return [page for page in _pages() if page.name != "ARCHITECTURE.md"]


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _anchors(page: Path) -> set[str]:
    """GitHub's anchors of the headings: lower case, blanks as hyphens, no punctuation, a number where they repeat."""
    found: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", page.read_text(encoding="utf-8"))):
        shown = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", heading)
        anchor = plain = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        number = 0
        while anchor in found:
            number += 1
            anchor = f"{plain}-{number}"
        found.add(anchor)
    return found


def _links(page: Path) -> list[str]:
    links = _LINK.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))
    return [link for link in links if not re.match(r"[a-z]+:", link)]


@pytest.mark.parametrize("page", _pages(), ids=_name)
def test_relative_links_and_anchors_resolve(page: Path) -> None:
    broken = []
    for link in _links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", _of_users(), ids=_name)
def test_options_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    known = option_types()
    named = {".".join(found) for found in _FLAG.findall(text)}
    named |= {".".join(found) for found in _NAMED.findall(text) if found[0] in sections() and found[1] not in _ENDINGS}
    assert sorted(name for name in named if name not in known) == []


@pytest.mark.parametrize("page", _of_users(), ids=_name)
def test_commands_and_sections_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    unknown = {name for name in _COMMAND.findall(text) if name not in (*COMMANDS, "in")}
    assert not unknown
    assert {name for name in _SECTION.findall(text) if name not in SECTIONS} == set()


def _command_lines(page: Path) -> list[list[str]]:
    """Each command line of a page as words, from the command's own name on."""
    text = page.read_text(encoding="utf-8")
    found = []
    for line in [*_LINE.findall(text), *_INLINE.findall(text)]:
        words = shlex.split(line.replace("\\\n", " ").partition(" > ")[0], comments=True)
        if any(word in ("...", "|", "&&") for word in words):
            continue
        script = next((word for word in words if word.startswith("tools/")), None)
        if script is None and "rankfold" not in words:  # torchrun with a program of the reader's
            continue
        start = words.index(script or "rankfold")
        if words[:1] == ["torchrun"] and script is None:
            assert words[start - 1] == "-m", line
        name = words[start + 1] if script is None else Path(script).stem.replace("pretrain_lora", "train")
        found.append([name, *words[start + (2 if script is None else 1) :]])
    return found


@pytest.mark.parametrize("page", _of_users(), ids=_name)
def test_command_lines_are_what_their_parsers_take(page: Path) -> None:
    for name, *words in _command_lines(page):
        if name in _PARSERS and len(words) > 1 and "--help" not in words:
            _PARSERS[name]().parse_args(words)  # a refusal ends the test


def test_command_lines_are_found() -> None:
    names = [name for page in _of_users() for name, *_ in _command_lines(page)]
    assert set(names) >= {*_PARSERS, "train", "launch"}
    assert len(names) > 80


@pytest.mark.parametrize("page", _of_users(), ids=_name)
def test_files_that_are_named_exist(page: Path) -> None:
    missing = []
    for name in _SCRIPT.findall(page.read_text(encoding="utf-8")):
        head, brace, rest = name.partition("{")
        choices, _, tail = rest.partition("}")
        names = [head + one + tail for one in choices.split(",")] if brace else [name]
        missing += [one for one in names if not any(ROOT.glob(one))]
    assert not missing


def test_the_index_lists_every_page_once_in_order() -> None:
    index = [link.partition("#")[0] for link in _links(ROOT / "docs/README.md") if not link.startswith("..")]
    assert len(index) == len(set(index))
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert set(index) == pages - {"README.md"}


def test_readme_is_a_page_that_one_reads() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 100
    for command in ("bash tests/run.sh", "bash examples/quickstart/run.sh"):
        assert command in text


def test_every_file_of_figures_says_where_they_were_taken_and_is_linked() -> None:
    files = sorted((ROOT / "docs/benchmarks").glob("*.json"))
    linked = {link.partition("#")[0] for link in _links(ROOT / "BENCHMARKS.md")}
    assert {_name(file) for file in files} == {link for link in linked if link.endswith(".json")}
    for file in files:
        table = json.loads(file.read_text(encoding="utf-8"))
        assert {"title", "date", "machine", "versions", "command", "columns", "rows", "findings"} <= table.keys(), file
        assert table["machine"]["CPU"] and table["date"], file
        assert table["command"] or any("not recorded" in note for note in table["notes"]), file
        assert table["rows"], file
        assert all(list(row) == table["columns"] for row in table["rows"]), file


def test_what_the_page_of_results_says_of_steps_is_in_their_files() -> None:
    rows = re.findall(
        r"^\| A[^|]+\|[^|]+\| ([\d.]+) \| ([\d.]+) \| \*\*([\d.]+)\*\* \(([\d.]+) to ([\d.]+)\) \| ([\d.]+) "
        r"\| (\d+) / (\d+) \| \[json\]\(([^)]+)\) \|$",
        (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert len(rows) == 7
    for ours, theirs, *speeds, our_peak, their_peak, link in rows:
        table = json.loads((ROOT / link).read_text(encoding="utf-8"))
        engine, peft = table["rows"][:2]
        assert (float(ours), float(theirs)) == (engine["median ms"], peft["median ms"])
        assert (int(our_peak), int(their_peak)) == (engine["peak MiB"], peft["peak MiB"])
        said = " ".join(table["findings"])
        plain = re.search(r"transformers \+ PEFT: ([\d.]+) \(from ([\d.]+) to ([\d.]+)\)", said)
        kept = re.search(r"freed memory kept: ([\d.]+) \(from", said)
        assert plain and kept
        for shown, exact in zip(speeds, (*plain.groups(), kept[1]), strict=True):
            assert abs(float(shown) - float(exact)) <= 0.00501, (link, shown, exact)
