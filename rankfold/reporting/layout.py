"""Layout elements of the page: cards, tables, legends, runs beside each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from markupsafe import Markup

from rankfold.reporting.markup import EMPTY, Content, element
from rankfold.reporting.reading import Run

COLOURS = 6
"""Number of colours in the palette."""


def section(title: str, content: Content) -> Markup:
    """Returns a card with a section; empty where there is nothing in it."""
    return element("section", element("h2", title), content) if content else EMPTY


def key(place: int) -> Markup:
    """Returns the coloured square of the run at a place."""
    return element("span", class_=f"key b{place % COLOURS}")


def legend(entries: Sequence[tuple[str, int]]) -> Markup:
    """Returns the names with their colours."""
    return element("ul", [element("li", key(colour), name) for name, colour in entries], class_="legend")


def table(
    rows: Sequence[tuple[Content, Sequence[Content]]],
    head: Sequence[str] = (),
    *,
    even: bool = False,
    figures: bool = False,
) -> Markup:
    """Returns a table with names at the left.

    Args:
        rows: name and cells.
        head: titles of the columns.
        even: every run's column is equally wide.
        figures: cells are numbers, set to the right.
    """
    top = element("tr", [element("th", cell) for cell in head]) if head else None
    body = [element("tr", element("th", name, scope="row"), [element("td", c) for c in cells]) for name, cells in rows]
    kinds = " ".join(name for name, wanted in (("even", even), ("figures", figures)) if wanted)
    return element("div", element("table", top, body, class_=kinds or None), class_="scroll")


def beside(runs: Sequence[Run], draw: Callable[[Run, Sequence[Run]], Markup]) -> Markup:
    """Returns the drawings of all runs beside each other; empty where none has one."""
    drawn = [(run, draw(run, runs)) for run in runs]
    if not any(content for _, content in drawn):
        return EMPTY
    if len(runs) == 1:
        return drawn[0][1]
    missing = element("p", "Not recorded.", class_="missing")
    cells = [
        element("div", element("h3", key(place), run.name), content or missing, class_="cell")
        for place, (run, content) in enumerate(drawn)
    ]
    return element("div", cells, class_="beside")


def side_by_side(*drawn: Markup) -> Markup:
    """Returns those drawings beside each other that have content; empty where none has."""
    cells = [element("div", one, class_="cell") for one in drawn if one]
    return element("div", cells, class_="beside") if cells else EMPTY


def stacked(runs: Sequence[Run], draw: Callable[[Run], Markup]) -> Markup:
    """Returns the drawings of all runs below each other, for those that need all of the width."""
    drawn = [(place, run, draw(run)) for place, run in enumerate(runs)]
    titled = len(runs) > 1
    return EMPTY.join(
        Markup("{}{}").format(element("h3", key(place), run.name) if titled else EMPTY, content)
        for place, run, content in drawn
        if content
    )
