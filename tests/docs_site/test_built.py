"""The built site: no warning, no link or anchor that leads nowhere, nothing that is fetched from another host."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("zensical") is None, reason="pip install -e '.[docs]' has what builds the site"),
]


class Page(HTMLParser):
    """What a page refers to, and the places in it that others can refer to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.loaded.append(given["href"])
        if tag in ("script", "img", "iframe", "source") and "src" in given:
            self.loaded.append(given["src"])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of the site, and what its builder said."""
    out = tmp_path_factory.mktemp("docs")
    done = subprocess.run(
        [sys.executable, "-m", "tools.docs_site", "build", "--out", out], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out / "site", done.stdout + done.stderr


@pytest.fixture(scope="module")
def site(built: tuple[Path, str]) -> dict[Path, Page]:
    return {file: Page(file.read_text(encoding="utf-8")) for file in built[0].rglob("*.html")}


def test_nothing_is_warned_of(built: tuple[Path, str]) -> None:
    assert not re.search(r"warn|error|[1-9]\d* issue", built[1], re.IGNORECASE), built[1]


def test_every_link_leads_to_a_file_and_an_anchor(site: dict[Path, Page]) -> None:
    assert len(site) > 80
    broken = []
    for file, page in site.items():
        for link in [*page.links, *page.loaded]:
            address = urlsplit(link)
            if address.scheme or address.netloc or file.name == "404.html":
                continue
            target = (file.parent / unquote(address.path)).resolve() if address.path else file
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(address.fragment)
            if not target.is_file() or (target in site and anchor not in site[target].anchors):
                broken.append((file.name, link))
    assert not broken


def test_nothing_is_fetched_from_another_host(built: tuple[Path, str], site: dict[Path, Page]) -> None:
    assert [one for page in site.values() for one in page.loaded if urlsplit(one).netloc] == []
    for style in built[0].rglob("*.css"):
        assert not re.search(r"(?:url\(|@import\s*)[\"']?(?:https?:)?//", style.read_text(encoding="utf-8")), style


def test_search_knows_every_option(built: tuple[Path, str]) -> None:
    index = (built[0] / "search.json").read_text(encoding="utf-8")
    for place in (
        "options/lora.html#rank",
        "options/rollout.html#num_generations",
        "commands/plan.html#memory",
        "api.html",
    ):
        assert place in index
