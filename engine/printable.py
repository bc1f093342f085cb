"""Makes text from files and users safe for a terminal, where lines are printed, not where they are composed."""

from __future__ import annotations

import unicodedata

_UNPRINTABLE = ("Cc", "Cs", "Zl", "Zp")
"""Control characters, halves of characters, and separators that some terminals take for line ends."""
_BIDIRECTIONAL = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that reorder the text around them."""


def printable(text: str, *, keep: str = "\n\t") -> str:
    """`text` with escapes, such as \\x1b, in place of what a terminal would obey; names in files may hold anything.

    Args:
        keep: control characters that stay.
    """
    if text.isprintable():
        return text
    return "".join(one if one in keep or not _is_obeyed(one) else _escaped(one) for one in text)


def quoted(text: str) -> str:
    """Quotes a text on one line, with what would move a terminal's cursor escaped."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in f'"{text}"')


def _is_obeyed(one: str) -> bool:
    return unicodedata.category(one) in _UNPRINTABLE or one in _BIDIRECTIONAL


def _escaped(one: str) -> str:
    return one.encode("unicode_escape").decode("ascii")
