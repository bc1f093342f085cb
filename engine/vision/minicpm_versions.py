"""Which version of MiniCPM-V a config.json describes: it decides the language model, where patches find their positions
and how a conversation is written. No tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import UserError

VERSIONS = ("2.0", "2.5", "2.6")
TOWERS = {"siglip": "2.6", "siglip_vision_model": "2.6", "idefics2": "2.5", "idefics2_vision": "2.5"}
"""By the `model_type` of the tower: the version of a config.json that does not say. Tensors have the same names."""


def minicpm_v_version(config: Mapping[str, Any]) -> str:
    """Returns "2.0", "2.5" or "2.6": what `version` says, else what the tower's name tells.

    Raises:
        UserError: another version, or one that the rest of config.json contradicts.
    """
    given, is_named_in_timm = config.get("version"), "vision_encoder" in config
    vision = config.get("vision_config")
    tower = vision.get("model_type") if isinstance(vision, Mapping) else None
    if given is None:
        if is_named_in_timm:
            return "2.0"
        if not isinstance(tower, str) or tower not in TOWERS:
            raise UserError(
                f"config.json has no version and a tower of type {tower!r}, but of MiniCPM-V the versions 2.0, 2.5 and "
                "2.6 are supported: use one of these."
            )
        return TOWERS[tower]
    version = {"2": "2.0"}.get(str(given), str(given))
    if version not in VERSIONS:
        raise UserError(
            f"config.json has version {given!r} of MiniCPM-V, but only 2.0, 2.5 and 2.6 are supported: use one of them."
        )
    if (version == "2.0") != is_named_in_timm:
        has, expected = ("vision_encoder", "vision_config") if is_named_in_timm else ("no vision_encoder", "one")
        raise UserError(
            f"config.json has version {given!r} of MiniCPM-V and {has}, but that version has {expected}: correct it or "
            "copy it again."
        )
    return version


def pads_tiles(config: Mapping[str, Any]) -> bool:
    """Returns whether each tile's attention covers as many places as the longest tile of its conversation has patches.

    That is the arithmetic of 2.5: the original pads the tiles of a batch, and its mask of patches comes out all true.
    With `batch_vision_input` false in config.json it computes every tile alone.
    """
    return minicpm_v_version(config) == "2.5" and config.get("batch_vision_input") is not False
