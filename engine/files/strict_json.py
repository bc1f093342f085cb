"""Parses JSON from files that may be damaged or hostile: what is ambiguous or excessive is refused, never repaired."""

from __future__ import annotations

import json
import re
from typing import Any

_SHOWN = 80
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


class JsonFlaw(Exception):
    """The reason, in a few words, why a text is refused."""


def parse_json(data: bytes) -> Any:
    """Parses UTF-8 text that holds one JSON value.

    The caller bounds the size. Beyond the standard library's checks, names must not be given twice in a mapping, and
    no escape may stand for half a character. NaN and Infinity are numbers, since configurations have them.

    Raises:
        JsonFlaw: it is not such a text, or nests too deeply.
    """
    try:
        text = data.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_mapping)
        if _HALF_CHARACTER.search(text):  # a pair of halves is one character
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except RecursionError:
        raise JsonFlaw("it nests too deeply") from None
    except ValueError as error:  # not UTF-8, not JSON, or a number with thousands of digits
        raise JsonFlaw(" ".join(str(error).split())) from None


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise JsonFlaw(f"{shown(name)} is given twice")
            seen.add(name)
    return found


def shown(value: object) -> str:
    """Returns a value from such a file for an error sentence: on one line, printable, and short."""
    text = ascii(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
