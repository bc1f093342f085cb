"""The sources of the documentation's site: every page is reached, every link leads somewhere, every option is there."""

from __future__ import annotations

import argparse
import posixpath
import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import markdown
import pytest
import yaml
from markdown_it import MarkdownIt

from engine.config.option_names import option_fields, option_types
from rankfold.__main__ import COMMANDS
from tests.support.sweeps import portion
from tools.docs_site import command_pages, links, navigation, option_pages, pages

ROOT = Path(__file__).resolve().parents[2]
_HEADING = re.compile(r"^#{1,6} +(.+?)(?: \{ #([^ ]+) \})?$", re.MULTILINE)
_LINK = re.compile(r"(?<!\\)\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def site() -> dict[str, str]:
    return pages.site_pages(ROOT)


def _listed(entries: list[Any]) -> list[str]:
    found: list[str] = []
    for entry in entries:
        for page in entry.values() if isinstance(entry, dict) else [entry]:
            found += [page] if isinstance(page, str) else _listed(page)
    return found


def _anchors(text: str) -> set[str]:
    found: set[str] = set()
    for heading, given in _HEADING.findall(_unfenced(text)):
        found.add(given or links.slug(re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", heading)))
    return found


def _unfenced(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def test_navigation_has_every_guide_and_generated_page_once(site: dict[str, str]) -> None:
    listed = _listed(navigation.navigation(ROOT))
    assert len(listed) == len(set(listed))
    assert set(listed) <= site.keys()
    assert {page for page in site if not page.startswith("code/")} == set(listed)


def test_links_of_every_page_lead_to_a_page_and_an_anchor(site: dict[str, str]) -> None:
    broken = []
    for page, text in site.items():
        for link in _LINK.findall(re.sub(r"`[^`\n]*`", "", _unfenced(text))):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
            if target in site:
                if anchor and anchor not in _anchors(site[target]):
                    broken.append((page, link))
            elif not (ROOT / "docs" / target).is_file():
                broken.append((page, link))
    assert not broken


def test_every_option_is_explained_on_the_page_of_its_section(site: dict[str, str]) -> None:
    for name in option_types():
        target = option_pages.option_of(name)
        assert target is not None
        page, _, anchor = target.partition("#")
        assert f"## {anchor} {{ #{anchor} }}" in site[page], name
        assert f"`{name}`: " in site[page], name
    assert "`lora.rank`: whole number; default `16`" in site["options/lora.md"]
    assert "`model.path`: text; must be given" in site["options/model.md"]


def test_defaults_are_what_a_run_file_takes(site: dict[str, str]) -> None:
    for name, field in option_fields().items():
        written = re.search(rf"^`{re.escape(name)}`: .*?default `([^`]*)`", "\n".join(site.values()), re.MULTILINE)
        if written is not None:
            value = yaml.safe_load(written[1])
            assert (tuple(value) if isinstance(field.default, tuple) else value) == field.default, name


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (int, "whole number"),
        (int | None, "whole number or `null`"),
        (bool | Literal["a"], "true, false or `a`"),
        (Literal["a", "b"], "one of `a`, `b`"),
        (tuple[str, ...], "list, each a text"),
        (dict[str, int] | None, "mapping of text to whole number, or `null`"),
    ],
)
def test_types_are_described_in_words(kind: Any, words: str) -> None:
    assert option_pages.described(kind) == words


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != command_pages.RUN])
def test_every_flag_of_every_command_is_on_its_page(site: dict[str, str], command: str) -> None:
    text = site[f"commands/{command}.md"]
    waiting = [command_pages.parser_of(command)]
    while waiting:
        for action in waiting.pop()._actions:
            if isinstance(action, argparse._SubParsersAction):
                waiting += action.choices.values()
                assert all(f" {{ #{name} }}" in text for name in action.choices)
            elif action.help != argparse.SUPPRESS and action.dest != "help":
                assert not action.option_strings or action.option_strings[-1] in text, action


def test_names_of_options_and_commands_lead_to_their_explanations() -> None:
    text = "`lora.rank` and `--lora.rank 8`, `rankfold plan memory --model M`, `rankfold report`, `nothing.here`\n"
    shown = links.for_site(text, "docs/data.md", pages.explained)
    assert shown == (
        "[`lora.rank`](options/lora.md#rank) and [`--lora.rank 8`](options/lora.md#rank), "
        "[`rankfold plan memory --model M`](commands/plan.md#memory), [`rankfold report`](commands/report.md), "
        "`nothing.here`\n"
    )


def test_links_out_of_the_folder_stay_on_the_site() -> None:
    text = "[a](../BENCHMARKS.md#speed) [b](../examples/memory/README.md) [c](../README.md#supported-models) [d](x.md)"
    shown = links.for_site(text, "docs/internals/page.md".replace("internals/", ""), lambda code: None)
    assert shown == "[a](benchmarks.md#speed) [b](examples/memory.md) [c](about.md#supported-models) [d](x.md)"


def test_blocks_of_code_are_left_alone() -> None:
    text = "```\n[a](../BENCHMARKS.md) `lora.rank`\n```\n"
    assert links.for_site(text, "docs/data.md", pages.explained) == text


def test_the_first_page_is_a_part_of_the_readme(site: dict[str, str]) -> None:
    for heading in links.HOME_HEADINGS:
        assert f"\n## {heading}\n" in site[links.HOME]
    headings = re.findall(r"^## .+$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    both = re.findall(r"^## .+$", site[links.HOME] + site[links.ABOUT], re.MULTILINE)
    assert sorted(both) == sorted(headings)


@pytest.mark.parametrize(
    "path", portion([page for page in pages.repository_files(ROOT) if page.endswith(".md")], 4, ["README.md"])
)
def test_both_readers_of_markdown_see_the_same_parts(path: str) -> None:
    """The repository's page is read as CommonMark, the site as Python-Markdown, which needs more blank lines."""
    text = (ROOT / path).read_text(encoding="utf-8")
    theirs = MarkdownIt("commonmark").enable("table").render(text)
    ours = markdown.markdown(text, extensions=["tables", "fenced_code", "def_list", "attr_list"])
    assert _parts(ours) == _parts(theirs)


def _parts(html: str) -> Counter[str]:
    return Counter(re.findall(r"<(li|pre|table|tr|h\d|ul|ol|blockquote|img)\b", html))
