"""Marks what a help text names as code: options, flags, names of files and modules, choices in quotes."""

from __future__ import annotations

import re

from engine.config.option_names import option_types

_CODE = re.compile(
    r""""(?P<quoted>[\w.*:-]+)"|(?P<braces>\{[^{}]*\})|(?P<expression>\.\*\S*\w)"""
    r"|(?<![\w./`*\\-])(?P<flag>--[a-z][\w.-]*\w|-[a-z]\b)"
    r"|(?<![\w./`*\\-])(?P<dotted>[a-z]+\.[a-z_0-9]+)(?![\w/(]|\.\w)"
    r"|(?<![\w./`*\\-])(?P<name>[a-z0-9]+(?:_[a-z0-9]+)+)(?![\w/(]|\.\w)"
)


def as_code(text: str, own: str | None = None) -> str:
    """Returns a help text as Markdown.

    Args:
        text: as a terminal shows it.
        own: the option that the text explains: others that it names are links beside its own page.
    """
    from tools.docs_site.option_pages import option_of

    def mark(match: re.Match[str]) -> str:
        word = match["quoted"] or match[0]
        if match["dotted"] and word not in option_types():
            return _escaped(word)
        target = option_of(word.removeprefix("--")) if own not in (None, word) and "." in word else None
        return f"[`{word}`]({target.removeprefix('options/')})" if target else f"`{word}`"

    parts, end = [], 0
    for match in _CODE.finditer(text):
        parts += [_escaped(text[end : match.start()]), mark(match)]
        end = match.end()
    return "".join([*parts, _escaped(text[end:])])


def _escaped(text: str) -> str:
    """Markdown's own characters as they are."""
    return re.sub(r"([*<>\[\]|\\`])", r"\\\1", text)
