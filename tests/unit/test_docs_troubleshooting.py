"""docs/troubleshooting.md: each line that it shows is printed by the code, word for word."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
LINES = [
    line
    for block in re.findall(r"^```\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
    if not line.startswith("torch.")
]
"""All lines in blocks but those of torch's own."""
INLINE = (
    "a process has ended: its own last lines say why",
    "so a rank hangs or is far behind: look where its process stands",
    "reference (plain torch)",
)
FOLDERS = ("checkpoint", "config", "data", "hub", "hybrids", "objectives", "ops", "runtime", "training")
"""Of engine/: where such lines are written."""
_A_PIECE = 12
"""Characters that are no coincidence."""


def _texts(node: ast.expr) -> Iterator[str]:
    """Yields the text of a constant or an f-string, with a mark in place of each value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)


@cache
def _sentences() -> tuple[str, ...]:
    found: list[str] = []
    for folder in FOLDERS:
        for file in (ROOT / "engine" / folder).rglob("*.py"):
            docstrings: set[int] = set()
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):  # what is around a node comes before it
                if isinstance(node, ast.Expr):
                    docstrings.add(id(node.value))
                elif isinstance(node, ast.expr) and id(node) not in docstrings:
                    found += _texts(node)
    return tuple(found)


def _is_printed(line: str) -> bool:
    """Returns whether the fixed parts of a line stand in one text of the code, in their order, with values between;
    or in several, each of which has a good piece of it."""
    return _are_printed([part.strip() for part in line.split("...") if part.strip()])


def _are_printed(parts: list[str]) -> bool:
    wanted = re.compile(r"[^\n]*".join(map(re.escape, parts)))
    if sum(map(len, parts)) >= _A_PIECE and any(wanted.search(text) for text in _sentences() if parts[-1] in text):
        return True
    return any(_are_printed(parts[:end]) and _are_printed(parts[end:]) for end in range(1, len(parts)))


@pytest.mark.parametrize("line", [*LINES, *INLINE])
def test_the_line_is_in_the_code(line: str) -> None:
    assert _is_printed(line)


def test_other_lines_are_not() -> None:
    assert len(LINES) > 35
    for line in (
        "the tokenizer of ... has no chat templates",
        "kernels: slow",
        "... dropped: the answer alone fills ...",
    ):
        assert not _is_printed(line)
