"""docs/glossary.md: its terms are in order, and are those of the other pages."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TERMS = re.findall(
    r"^\| ([^|`]+?) \| [^|]+ \|$", (ROOT / "docs/glossary.md").read_text(encoding="utf-8"), re.MULTILINE
)[1:]


def test_terms_are_in_alphabetical_order_and_once() -> None:
    assert len(TERMS) > 50
    lowered = [term.lower() for term in TERMS]
    assert lowered == sorted(set(lowered))


def test_every_term_is_used_by_a_page_of_users() -> None:
    pages = [*ROOT.glob("docs/*.md"), ROOT / "README.md"]
    text = " ".join(page.read_text("utf-8") for page in pages if page.name != "glossary.md").lower()
    words = re.sub(r"\s+", " ", text)
    unused = [term for term in TERMS if not re.search(rf"\b{re.escape(term.lower())}", words)]
    assert unused == []
