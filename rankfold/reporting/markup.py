"""HTML and SVG elements whose text and attributes are always escaped.

Everything on the page is an `element`: values that are not markup are text, whatever its origin and type.
"""

from __future__ import annotations

from collections.abc import Iterable

from markupsafe import Markup

Content = str | Iterable["Content"] | None
"""Text, which is escaped; Markup, which is not; several of these; or nothing."""

_VOID = frozenset({"meta", "br", "wbr"})
EMPTY = Markup("")


def element(tag: str, *content: Content, **attributes: object) -> Markup:
    """Makes one element.

    Args:
        tag: its name, such as "td".
        content: its children.
        attributes: `class_` is class, `stroke_width` is stroke-width; None omits one. viewBox and
            preserveAspectRatio keep their capitals.
    """
    given = EMPTY.join(
        Markup(' {}="{}"').format(name.rstrip("_").replace("_", "-"), str(value))
        for name, value in attributes.items()
        if value is not None
    )
    if tag in _VOID:
        return Markup("<{}{}>").format(tag, given)
    return Markup("<{}{}>{}</{}>").format(tag, given, together(*content), tag)


def together(*content: Content) -> Markup:
    """Returns several pieces of content, one after the other."""
    return EMPTY.join(_pieces(content))


def _pieces(content: Iterable[Content]) -> Iterable[str]:
    for piece in content:
        if isinstance(piece, str):
            yield piece  # Markup's join escapes it where it is plain text
        elif piece is not None:
            yield from _pieces(piece)
