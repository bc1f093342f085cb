"""The sizes of towers that take pictures of one size, as `config.json` gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import UserError

Grids = tuple[tuple[int, int], ...]
"""Rows and columns, in patches, of each tile."""


def counts_from_hf(part: object, keys: tuple[str, ...], place: str = "") -> dict[str, int]:
    """Reads whole numbers above 0 from a mapping of `config.json`.

    Args:
        place: where the mapping stands; empty for the top.

    Raises:
        UserError: there is no mapping, or one of them is missing or something else.
    """
    if not isinstance(part, Mapping):
        raise UserError(f"config.json lacks {place}, which describes the vision tower: copy it again.")
    for key in keys:
        value: Any = part.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            name = f"{place}.{key}" if place else key
            raise UserError(
                f"config.json has {name} {value!r}, but a whole number above 0 is expected: correct it or copy it "
                "again."
            )
    return {key: int(part[key]) for key in keys}


def sizes_in_code(hf: Mapping[str, Any], key: str) -> tuple[str, Mapping[str, Any]] | None:
    """Returns the mapping of `config.json` that has `key`, with its name; None where no mapping has.

    Some originals have a tower's sizes in their code. A checkpoint of other sizes gives them in a mapping of its own,
    whatever its name; the documented one is `tower_config` or, for an encoder beside the tower, `cross_vision_config`.
    """
    return next(((name, part) for name, part in hf.items() if isinstance(part, Mapping) and key in part), None)


def square_side(image: int, patch: int, place: str) -> int:
    """Returns the patches on a side of a square picture.

    Raises:
        UserError: it does not divide into patches.
    """
    if image % patch:
        raise UserError(
            f"config.json has pictures of {image} pixels in {place}, which do not divide into patches of {patch}: "
            "correct it or copy it again."
        )
    return image // patch


def check_grids(grids: Grids, side: int) -> None:
    """Raises ValueError where a tile has another size than the tower's."""
    for grid in grids:
        if grid != (side, side):
            raise ValueError(f"a tile of {grid[0]} x {grid[1]} patches came to a tower of {side} x {side}")
