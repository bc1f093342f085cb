"""Where a page of the repository is on the site, and its text with the links that lead there.

Pages are plain Markdown whose links work on the repository's own web page; the site has the same text. On the site, the
name of an option or of a command leads to its explanation too.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import PurePosixPath

TOP = {
    "AGENTS.md": "internals/agents.md",
    "ARCHITECTURE.md": "internals/architecture.md",
    "BENCHMARKS.md": "benchmarks.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "internals/contributing.md",
}
"""Pages at the top of the repository -> of the site. README.md is divided into HOME and ABOUT."""
HOME, ABOUT, CONTENTS = "index.md", "about.md", "contents.md"
HOME_HEADINGS = ("Install and see it work", "Your own model and data", "Speed")
"""Sections of README.md that the first page has; the others are ABOUT."""

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK_OR_CODE = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)\s]+)(\))|(`[^`\n]+`)")


def site_path(path: str) -> str:
    """Returns the path on the site of a file of the repository."""
    if path in TOP:
        return TOP[path]
    if path == "docs/README.md":
        return CONTENTS
    parts = PurePosixPath(path).parts
    if parts[0] == "docs":
        return "/".join(parts[1:])
    if parts[0] == "examples" and parts[-1] == "README.md":
        return f"{'/'.join(parts[:-1])}.md"
    return f"code/{path}" if path.endswith(".md") else f"code/{path}.md"


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """Returns a text whose parts between its blocks of code are changed."""
    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def linked_files(text: str, path: str) -> list[str]:
    """Returns the files of the repository that a page's links lead to, without figures and pictures of docs/."""
    found: list[str] = []

    def collect(part: str) -> str:
        for link in _LINK_OR_CODE.finditer(part):
            if link[2] and not _is_outside(link[2]):
                found.append(_resolved(link[2].partition("#")[0], path))
        return part

    outside_fences(text, collect)
    return [file for file in found if file.endswith(".md") or not file.startswith("docs/")]


def for_site(text: str, path: str, named: Callable[[str], str | None], place: str | None = None) -> str:
    """Returns the text of a page with the site's links.

    Args:
        text: Markdown.
        path: of the page, in the repository.
        named: gives the page and anchor of the site that explain what stands in `code`, or None.
        place: of the page on the site, where `site_path` does not say it.
    """
    folder = posixpath.dirname(place or site_path(path)) or "."

    def link(match: re.Match[str]) -> str:
        if match[4]:
            start = match.string.rfind("\n", 0, match.start()) + 1
            line = match.string[start : match.start()]
            target = None if line.startswith(("#", "    ")) else named(match[4].strip("`"))
            return f"[{match[4]}]({posixpath.relpath(target, folder)})" if target else match[4]
        if _is_outside(match[2]):
            return match[0]
        target, hash_, anchor = match[2].partition("#")
        resolved = _resolved(target, path)
        where = _part_of_readme(anchor) if resolved == "README.md" else site_path(resolved)
        return f"{match[1]}{posixpath.relpath(where, folder)}{hash_}{anchor}{match[3]}"

    return outside_fences(text, lambda part: _LINK_OR_CODE.sub(link, part))


def slug(heading: str) -> str:
    """Returns the anchor of a heading without links or code."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _part_of_readme(anchor: str) -> str:
    return HOME if not anchor or anchor in map(slug, HOME_HEADINGS) else ABOUT


def _is_outside(link: str) -> bool:
    return bool(re.match(r"[a-z]+:|#", link))


def _resolved(link: str, path: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
