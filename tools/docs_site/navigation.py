"""The site's navigation: the headings and tables of docs/README.md, and the pages that are made from the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tools.docs_site.command_pages import command_names
from tools.docs_site.links import ABOUT, CONTENTS, HOME, linked_files, site_path
from tools.docs_site.option_pages import section_names

_SECTION = re.compile(r"^## (.+)$|^\| \[([^\]]+)\]\(([^)\s]+)\)", re.MULTILINE)
EXAMPLES = "examples.md"
_REFERENCE = "Reference"


def navigation(root: Path) -> list[dict[str, Any]]:
    """Returns the navigation as mkdocs.yml has it: one-item mappings of a title to a page or to a list of them."""
    index = (root / "docs/README.md").read_text(encoding="utf-8")
    sections: dict[str, list[Any]] = {}
    pages: list[Any] = []
    for heading, title, link in _SECTION.findall(index):
        if heading:
            pages = sections.setdefault(heading, [])
            continue
        place = site_path(link.removeprefix("../") if link.startswith("../") else f"docs/{link}")
        pages.append({title: _examples(root) if place == EXAMPLES else place})
    first = next(iter(sections))
    sections[first] = [HOME, {"Features": ABOUT}, *sections[first], {"All pages": CONTENTS}]
    sections[_REFERENCE] = [*_from_code(), *sections[_REFERENCE]]
    return [{heading: pages} for heading, pages in sections.items()]


def _examples(root: Path) -> list[Any]:
    text = (root / "docs" / EXAMPLES).read_text(encoding="utf-8")
    # pages of docs/ have places of their own
    outside = [page for page in linked_files(text, f"docs/{EXAMPLES}") if not page.startswith("docs/")]
    return [EXAMPLES, *dict.fromkeys(map(site_path, outside))]


def _from_code() -> list[Any]:
    options = ["options/index.md", *({name: f"options/{name}.md"} for name in section_names())]
    commands = ["commands/index.md", *({f"rankfold {name}": f"commands/{name}.md"} for name in command_names())]
    return [{"Options of a run": options}, {"Commands": commands}, {"Python, object by object": "api.md"}]
