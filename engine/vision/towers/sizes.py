"""The sizes of towers that take images of one size, as `config.json` gives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import UserError
from engine.vision.tower_defaults import whole_tower

Grid = tuple[int, ...]
"""Rows and columns of a tile, in patches, and behind that what else its model has to know."""
Grids = tuple[Grid, ...]
"""The grid of each tile."""
ENCODER_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "patch_size", "image_size",
)  # fmt: skip
"""Keys of `vision_config` for the sizes of a plain transformer encoder, as transformers names them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SquareTiles:
    """Tiles of one size.

    Args:
        patch: pixels on a side of a patch.
        side: patches on a side of a tile.
    """

    patch: int
    side: int

    @property
    def patch_features(self) -> int:
        """Numbers of a patch."""
        return 3 * self.patch**2

    @property
    def usual_tile(self) -> tuple[int, int]:
        """Rows and columns, in patches, of every tile."""
        return self.side, self.side


def _named(key: str, place: str) -> str:
    return f"{place}.{key}" if place else key


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
            raise UserError(
                f"config.json has {_named(key, place)} {value!r}, but a whole number above 0 is expected: correct it "
                "or copy it again."
            )
    return {key: int(part[key]) for key in keys}


def vision_part(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `vision_config` of a model that transformers has, with what it leaves out.

    Raises:
        UserError: there is none.
    """
    if (vision := whole_tower(hf)) is None:
        raise UserError("config.json lacks vision_config, which describes the vision tower: copy it again.")
    return vision


def sizes_in_code(hf: Mapping[str, Any], key: str) -> tuple[str, Mapping[str, Any]] | None:
    """Returns the mapping of `config.json` that has `key`, with its name; None where no mapping has.

    Some originals have a tower's sizes in their code. A checkpoint of other sizes gives them in a mapping of its own,
    whatever its name; the documented one is `tower_config` or, for an encoder beside the tower, `cross_vision_config`.
    """
    return next(((name, part) for name, part in hf.items() if isinstance(part, Mapping) and key in part), None)


ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "gelu_new", "quick_gelu", "relu", "silu")
"""That towers and projectors may have, as transformers names them."""


def activation_from_hf(part: Mapping[str, Any], key: str, place: str = "") -> str:
    """Reads the name of an activation.

    Raises:
        UserError: it is none of ACTIVATIONS.
    """
    if (value := part.get(key)) not in ACTIVATIONS:
        raise UserError(
            f"config.json has {_named(key, place)} {value!r}, but one of {', '.join(ACTIVATIONS)} is expected: use a "
            "model with that."
        )
    return str(value)


def number_from_hf(part: Mapping[str, Any], key: str, place: str = "") -> float:
    """Reads a number above 0.

    Raises:
        UserError: it is something else.
    """
    value = part.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise UserError(
            f"config.json has {_named(key, place)} {value!r}, but a number above 0 is expected: correct it or copy it "
            "again."
        )
    return float(value)


def check_settings(vision: Mapping[str, Any]) -> None:
    """Raises UserError where an encoder drops values in training, or reads other than three channels, which those here
    do not."""
    for key, value in _SETTINGS.items():
        if (given := vision.get(key)) is not None and given != value:
            raise UserError(
                f"config.json has vision_config.{key} {given!r}, but {value!r} is expected: use a model with that."
            )


_SETTINGS = {"attention_dropout": 0.0, "hidden_dropout_prob": 0.0, "projection_dropout": 0.0, "num_channels": 3}


def heads_fit(width: int, heads: int) -> None:
    """Raises UserError where a tower's width does not divide into its heads."""
    if width % heads:
        raise UserError(
            f"config.json has vision_config.hidden_size {width}, which does not divide into {heads} heads: correct it "
            "or copy it again."
        )


def square_side(image: int, patch: int, place: str) -> int:
    """Returns the patches on a side of a square image.

    Raises:
        UserError: it does not divide into patches.
    """
    if image % patch:
        raise UserError(
            f"config.json has images of {image} pixels in {place}, which do not divide into patches of {patch}: "
            "correct it or copy it again."
        )
    return image // patch


def whole_patches(image: int, patch: int, place: str) -> int:
    """Returns the patches on a side of a square image whose tower passes over pixels behind the last whole patch.

    Raises:
        UserError: there is no whole patch.
    """
    if image < patch:
        raise UserError(
            f"config.json has images of {image} pixels in {place}, which are less than a patch of {patch}: correct "
            "it or copy it again."
        )
    return image // patch


def check_grids(grids: Grids, side: int) -> None:
    """Raises ValueError where a tile has another size than the tower's."""
    for grid in grids:
        if grid != (side, side):
            raise ValueError(f"a tile of {grid[0]} x {grid[1]} patches came to a tower of {side} x {side}")
