"""Reads small text and JSON files by people or other programs: returns the content, or raises one sentence."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from engine.errors import UserError
from engine.files import platforms
from engine.files.refusals import reading, shown
from engine.files.strict_json import JsonFlaw, parse_json

_COPY_AGAIN = "copy it again"
_MOST_BYTES = 256 << 20
"""Size limit of such a file. A vocabulary of 250,000 tokens takes 20 MiB."""


@contextmanager
def open_file(path: str | os.PathLike[str], advice: str | None = None) -> Iterator[BinaryIO]:
    """Opens a file of any size for reading; the system's errors meanwhile become a sentence.

    Args:
        path: of a regular file. A pipe could be read only once, and opening it would wait for a writer.
        advice: the remedy, such as "give another --source".

    Raises:
        UserError: it is no file, or cannot be read.
    """
    with reading(path, advice):
        descriptor = os.open(path, os.O_RDONLY | platforms.NONBLOCK | platforms.CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise UserError(f"{shown(path)} is not a file: {advice or 'check the path'}.")
            yield file


def read_bytes(path: str | os.PathLike[str], advice: str | None = None) -> bytes:
    """Returns the bytes of a small file.

    Args:
        path, advice: as for `open_file`.

    Raises:
        UserError: as `open_file`, or it is larger than such files are.
    """
    with open_file(path, advice) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MOST_BYTES:
            raise UserError(f"{shown(path)} has {size:,} bytes, too many for such a file: {advice or _COPY_AGAIN}.")
        return file.read()


def read_text(path: str | os.PathLike[str], advice: str | None = None) -> str:
    """Returns the text of a small UTF-8 file.

    Raises:
        UserError: as `read_bytes`, or it is not UTF-8.
    """
    data = read_bytes(path, advice)
    with reading(path, advice):
        return data.decode("utf-8")


def read_json(path: str | os.PathLike[str], advice: str = _COPY_AGAIN) -> dict[str, Any]:
    """Returns the mapping that a small JSON file holds.

    Args:
        path: of the file.
        advice: the remedy where the file is damaged.

    Raises:
        UserError: as `read_bytes`; it is not JSON, is ambiguous or nested too deeply, or holds no mapping.
    """
    return parse_record(read_bytes(path), shown(path), advice)


def parse_record(line: str | bytes, place: str, advice: str) -> dict[str, Any]:
    """Returns the mapping that one line of a JSON-lines file holds.

    Args:
        line: without its end.
        place: the line's name in the sentence, such as "data.jsonl line 3".
        advice: the remedy.

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
