"""Small text and JSON files that a person or another program wrote: what they hold, or one sentence about the flaw."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from engine.errors import UserError
from engine.files.refusals import reading, shown
from engine.files.strict_json import JsonFlaw, parse_json

_COPY_AGAIN = "copy it again"
_MOST_BYTES = 256 << 20
"""Of such a file. A vocabulary of 250,000 tokens takes 20 MiB."""


def read_bytes(path: str | os.PathLike[str], advice: str | None = None) -> bytes:
    """The bytes of a small file.

    Args:
        path: of a regular file; a pipe or a device could be endless.
        advice: what to change, such as "give another --source".

    Raises:
        UserError: it cannot be read, is not a file, or is larger than such files are.
    """
    with reading(path, advice):
        place = Path(path)
        if place.exists() and not place.is_file():
            raise UserError(f"{shown(path)} is not a file: {advice or 'check the path'}.")
        if (size := place.stat().st_size) > _MOST_BYTES:
            raise UserError(f"{shown(path)} has {size:,} bytes, too many for such a file: {advice or _COPY_AGAIN}.")
        return place.read_bytes()


def read_text(path: str | os.PathLike[str], advice: str | None = None) -> str:
    """The text of a small UTF-8 file.

    Raises:
        UserError: as `read_bytes`, or it is not UTF-8.
    """
    data = read_bytes(path, advice)
    with reading(path, advice):
        return data.decode("utf-8")


def read_json(path: str | os.PathLike[str], advice: str = _COPY_AGAIN) -> dict[str, Any]:
    """The mapping that a small JSON file holds.

    Args:
        path: of the file.
        advice: what to change where the file is damaged.

    Raises:
        UserError: as `read_bytes`; it is not JSON, is ambiguous or nested too deeply, or holds no mapping.
    """
    try:
        found = parse_json(read_bytes(path))
    except JsonFlaw as flaw:
        raise UserError(f"{shown(path)} is not valid JSON ({flaw}): {advice}.") from None
    if not isinstance(found, dict):
        raise UserError(f"{shown(path)} holds no JSON mapping: {advice}.")
    return found


def parse_record(line: str | bytes, place: str, advice: str) -> dict[str, Any]:
    """The mapping that one line of a JSON-lines file holds.

    Args:
        line: without its end.
        place: how the sentence calls it, such as "data.jsonl line 3".
        advice: what to change.

    Raises:
        UserError: it is not JSON, or holds no mapping.
    """
    try:
        found = parse_json(line if isinstance(line, bytes) else line.encode("utf-8", "surrogatepass"))
    except JsonFlaw as flaw:
        raise UserError(f"{place} is not valid JSON ({flaw}): {advice}.") from None
    if not isinstance(found, dict):
        raise UserError(f"{place} holds no JSON mapping: {advice}.")
    return found
