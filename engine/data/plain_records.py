"""Records of Python programs and of tables, as JSON has them: they give the rows of the same records in a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from os import PathLike, fspath
from typing import Any

import numpy as np

from engine.data.record_files import Place, Record, checked_record

_MOST_DEPTH = 100
"""Levels of lists and mappings in a record."""


KeepImage = Callable[[Place, str, Any], str]
"""Writes an image, which a field of a record holds, to a file and returns its path. The image is Pillow's, or a mapping
with the bytes of a file, as `datasets` has it."""


def plain_record(place: Place, record: object, keep_image: KeepImage) -> Record:
    """Returns a record as JSON has it.

    Mappings become dictionaries, tuples and arrays lists, numpy's numbers Python's, paths and images texts.

    Args:
        place: of the record, for messages.
        record: a mapping of names to values.
        keep_image: see `KeepImage`.

    Raises:
        UserError: it is not a mapping, a name is no text, or a value is of another kind.
    """
    if not isinstance(record, Mapping):
        return checked_record(place, record)[1]
    return {_name(place, "", key): _plain(place, str(key), value, keep_image, 1) for key, value in record.items()}


def _name(place: Place, field: str, key: object) -> str:
    if not isinstance(key, str):
        where = f"field '{field}' has" if field else "the record has"
        raise place.error(f"{where} the key {key!r} of type {type(key).__name__}, expected a string; rename it.")
    return str(key)


def _plain(place: Place, field: str, value: Any, keep_image: KeepImage, depth: int) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value.item() if isinstance(value, np.generic) else value
    if depth > _MOST_DEPTH:
        raise place.error(f"field '{field}' has more than {_MOST_DEPTH} levels of lists and mappings; flatten it.")
    if _is_image(value):
        return keep_image(place, field, value)
    if isinstance(value, Mapping):
        named = ((_name(place, field, key), item) for key, item in value.items())
        return {key: _plain(place, f"{field}.{key}", item, keep_image, depth + 1) for key, item in named}
    if isinstance(value, (list, tuple)):
        return [_plain(place, f"{field}[{number}]", item, keep_image, depth + 1) for number, item in enumerate(value)]
    if isinstance(value, PathLike):
        return fspath(value)
    if isinstance(value, np.generic) or hasattr(value, "tolist"):  # arrays and tensors
        return _plain(place, field, value.tolist(), keep_image, depth + 1)
    raise place.error(
        f"field '{field}' is of type {type(value).__name__}, expected text, numbers, lists, mappings or an image; "
        "convert or remove it."
    )


def _is_image(value: object) -> bool:
    if isinstance(value, Mapping):
        return isinstance(value.get("bytes"), bytes)
    pillow = sys.modules.get("PIL.Image")  # an image's program has imported it
    return pillow is not None and isinstance(value, pillow.Image)
