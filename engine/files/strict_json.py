"""Parses JSON that may be damaged or hostile: what is ambiguous or excessive is refused, never repaired."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from engine.sentences import as_written, on_one_line

_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(set(range(256)) - set(_STEPS))


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonLimits:
    """Limits of a text beyond its size, which its reader bounds.

    Args:
        depth: of lists and objects in each other.
        digits: of an integer; None for the interpreter's own limit, which is thousands.
        finite: whether NaN, Infinity and numbers that are too large for a float are refused.
    """

    depth: int
    digits: int | None
    finite: bool


FILE_LIMITS = JsonLimits(depth=200, digits=None, finite=False)
"""Limits of files: configurations have NaN and Infinity, and lengths of 31 digits."""
ANSWER_LIMITS = JsonLimits(depth=32, digits=20, finite=True)
"""Limits of other programs' answers: an integer of 64 bits has 20 digits at most."""


class JsonFlaw(Exception):
    """The reason, in a few words, why a text is refused."""


def parse_json(data: bytes, limits: JsonLimits = FILE_LIMITS) -> Any:
    """Parses UTF-8 text that holds one JSON value.

    The caller bounds the size. Beyond the standard library's checks, names must not be given twice in a mapping, no
    escape may stand for half a character, and `limits` hold.

    Raises:
        JsonFlaw: it is not such a text.
    """
    try:
        text = data.decode("utf-8")
        if (depth := _depth(data)) > limits.depth:
            raise JsonFlaw(f"it nests too deeply: {depth} lists and objects in each other, {limits.depth} at most")
        value = json.loads(text, object_pairs_hook=_mapping, **_number_parsers(limits))
        if _HALF_CHARACTER.search(text):  # a pair of halves is one character
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except ValueError as error:  # not UTF-8, not JSON, or a number with thousands of digits
        raise JsonFlaw(on_one_line(str(error))) from None


def _depth(data: bytes) -> int:
    """Returns how many lists and objects of a JSON text are in each other, without parsing: the parser itself goes as
    deep as the interpreter's stack, and what walks its result later may go less deep."""
    # escapes first: what is left of quotes begins or ends a string
    outside = b"".join(data.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2])
    return max(accumulate(map(_STEPS.__getitem__, outside.translate(None, _NO_BRACKETS))), default=0)


def _number_parsers(limits: JsonLimits) -> dict[str, Any]:
    """Returns what `json.loads` is given to parse numbers."""
    found: dict[str, Any] = {}
    if (most := limits.digits) is not None:

        def integer(text: str) -> int:
            if len(text.lstrip("-")) > most:
                raise JsonFlaw(f"it has an integer of {len(text.lstrip('-'))} digits, {most} at most")
            return int(text)

        found["parse_int"] = integer
    if limits.finite:
        found |= {"parse_float": _finite, "parse_constant": _finite}
    return found


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise JsonFlaw(f"it has {as_written(text)} where a finite number was expected")
    return number


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise JsonFlaw(f"{as_written(name)} is given twice")
            seen.add(name)
    return found
