"""The Python language reference that ships inside CPython, as sections and paragraphs.

`pydoc_data.topics` holds the texts that `help("assert")` and its like print: plain text with underlined headings,
quoted code and indented definitions. Many topics repeat parts of others, so every paragraph is kept once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

UNDERLINE = re.compile(r"^([*=\-~^#])\1{2,}$")
LIST_ITEM = re.compile(r"^\s*([-*+]|\w{1,3}[.)])\s")
REPEATED_LENGTH = 40
"""Shorter paragraphs ("For example:") may come twice."""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what stands below it, up to the next heading.

    Args:
        title: the heading without its underline.
        paragraphs: blocks between blank lines, with their indentation; the lines of prose are joined into one.
    """

    title: str
    paragraphs: tuple[str, ...]

    def text(self) -> str:
        """Heading and paragraphs as they are learnt."""
        return "\n\n".join((self.title, *self.paragraphs)).strip() + "\n"


def read_topics() -> dict[str, str]:
    """Topic -> its text, from the interpreter that runs this.

    Raises:
        SystemExit: this Python was installed without its documentation.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise SystemExit(
            "error: this Python lacks the module pydoc_data.topics, whose text the quickstart trains on: install the "
            "complete standard library (on Debian and Ubuntu: libpython3-stdlib)."
        ) from None
    return dict(topics)


def read_sections(topics: dict[str, str]) -> list[Section]:
    """All sections, in the order of the topics' names, each paragraph once."""
    seen: set[str] = set()
    sections = []
    for _, text in sorted(topics.items()):
        for title, body in _split_at_headings(text):
            paragraphs = tuple(_unwrap(block) for block in _blocks(body) if _is_new(block, seen))
            if paragraphs:
                sections.append(Section(title, paragraphs))
    return sections


def _split_at_headings(text: str) -> list[tuple[str, list[str]]]:
    lines = text.strip().splitlines()
    found: list[tuple[str, list[str]]] = [("", [])]
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if UNDERLINE.match(line):
            continue
        if line.strip() and UNDERLINE.match(below):
            found.append((line.strip(), []))
        else:
            found[-1][1].append(line.rstrip())
    return [(title, body) for title, body in found if any(body)]


def _blocks(lines: list[str]) -> list[str]:
    return [block.strip("\n") for block in re.split(r"\n{2,}", "\n".join(lines)) if block.strip()]


def _is_new(block: str, seen: set[str]) -> bool:
    key = " ".join(block.split())
    if len(key) < REPEATED_LENGTH:
        return True
    if key in seen:
        return False
    seen.add(key)
    return True


def is_prose(block: str) -> bool:
    """Whether a block is sentences rather than code, grammar or a list."""
    first = block.lstrip()
    return not LIST_ITEM.match(block) and first[:1].isupper() and "::=" not in block and ">>>" not in block


def _unwrap(block: str) -> str:
    """The lines of a prose block joined, behind the indentation of its first."""
    indents = {len(line) - len(line.lstrip()) for line in block.splitlines()}
    if len(indents) > 1 or not is_prose(block):
        return block
    return " " * indents.pop() + " ".join(block.split())
