"""All pages of the site: those of docs/, what they link to in the repository, and what is made from the code."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tools.docs_site.api_page import api_page
from tools.docs_site.command_pages import command_of, command_pages
from tools.docs_site.links import ABOUT, HOME, HOME_HEADINGS, TOP, for_site, linked_files, site_path
from tools.docs_site.option_pages import option_of, option_pages

_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)


def site_pages(root: Path) -> dict[str, str]:
    """Returns path on the site -> Markdown.

    Args:
        root: of the repository.
    """
    made = {**option_pages(), **command_pages(), "api.md": api_page()}
    found = dict(made)
    for path in repository_files(root):
        text = (root / path).read_text(encoding="utf-8")
        if path == "README.md":
            home, about = _divided(text)
            found[HOME] = for_site(home, path, explained, HOME)
            found[ABOUT] = for_site(about, path, explained, ABOUT)
        elif not path.endswith(".md"):
            found[site_path(path)] = f"# {path}\n\n```{Path(path).suffix[1:]}\n{text.rstrip()}\n```\n"
        else:
            found[site_path(path)] = for_site(text, path, explained)
    return found


def repository_files(root: Path) -> list[str]:
    """Returns the pages of docs/, and the files that they lead to, by links of links."""
    waiting = [page.relative_to(root).as_posix() for page in sorted((root / "docs").rglob("*.md"))]
    waiting += ["README.md", *TOP]
    found: list[str] = []
    while waiting:
        path = waiting.pop(0)
        if path not in found:
            found.append(path)
            waiting += linked_files((root / path).read_text(encoding="utf-8"), path) if path.endswith(".md") else []
    return found


def explained(code: str) -> str | None:
    """Returns the page and anchor that explain an option or a command that is named in `code`, or None."""
    return option_of(code) or command_of(code)


def _divided(readme: str) -> tuple[str, str]:
    """The first page, and the rest of the README as a page of its own."""
    title, *parts = _HEADING.split(readme)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    joined: Callable[[bool], str] = lambda first: "".join(  # noqa: E731
        f"## {name}{text}" for name, text in sections.items() if (name in HOME_HEADINGS) is first
    )
    return title + joined(True), f"# Features and models\n\n{joined(False)}"
