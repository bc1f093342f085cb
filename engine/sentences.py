"""Words for messages to the user that hold what came from input: values as they are written, names, but not all, and
other programs' words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_MOST_NAMES = 8
_NAME_CHARACTERS, _VALUE_CHARACTERS, _WORDS_CHARACTERS = 200, 80, 300
_LARGEST = 10**20
"""The first integer whose digits are not shown."""


def listed(names: Iterable[object], *, most: int = _MOST_NAMES) -> str:
    """Returns names for a sentence: "a, b, c", or "a, b and 19,998 more" where there are more than `most`.

    Each is on one line and short, whatever it holds; without any names the text is empty.
    """
    found = [_short(str(name), _NAME_CHARACTERS) for name in names]
    more = f" and {len(found) - most:,} more" if len(found) > most else ""
    return f"{', '.join(found[:most])}{more}"


def as_written(value: object) -> str:
    """Returns a value of an option or a JSON file as the user writes it: null, true, 'text', [1, 2], {a: 1}."""
    return _short(_written(value), _VALUE_CHARACTERS)


def on_one_line(words: str, *, most: int = _WORDS_CHARACTERS) -> str:
    """Returns the words of a library or another program on one line, which is short."""
    line = " ".join(words.split())
    return line if len(line) <= most else f"{line[:most]}..."


def _written(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_written(one)}" for key, one in value.items()) + "}"
    if isinstance(value, int) and abs(value) >= _LARGEST:
        return "a number of many digits"
    return repr(value)


def _short(text: str, most: int) -> str:
    if not text.isprintable():
        text = ascii(text)[1:-1]
    return text if len(text) <= most else f"{text[:most]}..."
