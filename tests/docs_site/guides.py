"""The blocks of code of the guides, and the commands in them.

An indented block holds commands and nothing else. A block between fences names its language; one that names none is
what a command prints.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
SHELLS = ("bash", "sh", "console")
_COMMENT = re.compile(r"\s+#\s.*$")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code.

    Args:
        page: path in the repository.
        line: of its first line, from 1.
        language: behind the fence, "" where nothing is; None for an indented block.
        text: its lines.
    """

    page: str
    line: int
    language: str | None
    text: str


def guides() -> list[str]:
    """Returns the paths of README.md and of every page of docs/."""
    pages = [page.relative_to(ROOT).as_posix() for page in sorted((ROOT / "docs").rglob("*.md"))]
    return ["README.md", *pages]


def blocks(page: str) -> list[Block]:
    """Returns the blocks of a page in order."""
    tokens = MarkdownIt("commonmark").enable("table").parse((ROOT / page).read_text(encoding="utf-8"))
    return [
        Block(page, token.map[0] + 1, token.info.strip() if token.type == "fence" else None, token.content)
        for token in tokens
        if token.type in ("fence", "code_block") and token.map
    ]


def block_with(page: str, words: str) -> str:
    """Returns the only block of a page whose text contains the words."""
    (found,) = [one.text for one in blocks(page) if words in one.text]
    return found


def commands(page: str) -> list[str]:
    """Returns the commands of a page in order: without comments, lines that continue joined, each once."""
    found: list[str] = []
    for block in blocks(page):
        if block.language is None or block.language in SHELLS:
            lines = re.sub(r"\s*\\\n\s*", " ", block.text).splitlines()
            found += [command for line in lines if (command := _COMMENT.sub("", line).strip().removeprefix("$ "))]
    return [*dict.fromkeys(found)]
