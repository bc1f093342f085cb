"""The pictures of the guides: drawn from what commands print, small, and of this version."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from engine.errors import UserError
from tests.docs_site.guides import ROOT
from tests.docs_site.workplace import write_programs
from tools.docs_site import pictures

_IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")


def _texts(svg: str) -> list[str]:
    return [row.text or "" for row in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_lines_are_drawn_up_to_a_word_and_none_is_wider() -> None:
    program = "print('a < b & c'); print('  x   y'); print('word ' * 30); print('Until here'); print('no')"
    svg = pictures.terminal_picture([sys.executable, "-c", program], "Until")
    texts = _texts(svg)
    assert texts[0].startswith(f"$ {sys.executable}"[:20])
    assert "a < b & c" in texts and "  x   y" in texts
    assert sum(text.count("word") for text in texts) == 30 + program.count("word")
    assert not any("Until" in text for text in texts[-3:]) and max(map(len, texts)) <= pictures.COLUMNS


def test_a_command_that_fails_is_named() -> None:
    with pytest.raises(UserError, match=r"ended with status 3: said why"):
        pictures.terminal_picture([sys.executable, "-c", "import sys; print('said why', file=sys.stderr); sys.exit(3)"])


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_images_have_a_text_and_few_bytes(page: Path) -> None:
    for text, link in _IMAGE.findall(page.read_text(encoding="utf-8")):
        assert len(text) > 40, link
        assert (page.parent / link).stat().st_size < 80_000, link


@pytest.mark.slow
def test_the_planners_answer_is_of_this_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command in CONTRIBUTING.md draws the picture that there is."""
    write_programs(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(ROOT)
    command = re.search(
        r"--until (\w+) -- \\\n +(rankfold plan memory .+)", (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    )
    assert command
    drawn = pictures.terminal_picture(command[2].split(), command[1])
    assert drawn == (ROOT / "docs/assets/plan.svg").read_text(encoding="utf-8")
