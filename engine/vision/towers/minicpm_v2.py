"""MiniCPM-V 2.0: timm's SigLIP without its last block, and a resampler with a stored position for each query."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import UserError
from engine.vision.towers.resampled_tower import ResampledTimm, ResampledTimmConfig
from engine.vision.towers.resampler import Positions, ResamplerConfig
from engine.vision.towers.sizes import counts_from_hf, square_side
from engine.vision.towers.timm_vit import (
    SIGLIP_SO400M_384,
    timm_vit_from_hf,
    tower_sizes,
)

CHECKPOINT_PREFIX = ""
"""What precedes the parameters' names in a checkpoint."""

_TOWER = "vit_so400m_patch14_siglip_384"


@dataclass(frozen=True, kw_only=True, slots=True)
class MiniCPMV2VisionConfig(ResampledTimmConfig):
    """Sizes of tower and resampler; `side` is that of a square slice."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> MiniCPMV2VisionConfig:
        """Reads a `config.json`.

        Raises:
            UserError: it names another tower, or a size is missing or does not fit.
        """
        name = hf.get("vision_encoder")
        if tower_sizes(hf) is None and (not isinstance(name, str) or name.split(".")[0] != _TOWER):
            raise UserError(
                f"config.json has vision_encoder {name!r}, but MiniCPM-V 2.0 is supported with {_TOWER} alone: use the "
                "released model."
            )
        dropped = 1 if hf.get("drop_vision_last_layer", True) else 0
        tower = timm_vit_from_hf(hf, SIGLIP_SO400M_384, dropped=dropped)
        if (patch := counts_from_hf(hf, ("patch_size",))["patch_size"]) != tower.patch:
            raise UserError(
                f"config.json has patch_size {patch}, but its tower has patches of {tower.patch}: correct it or copy "
                "it again."
            )
        resolution = counts_from_hf({"scale_resolution": 448, **hf}, ("scale_resolution",))["scale_resolution"]
        return cls(
            tower=tower,
            resampler=ResamplerConfig.from_hf(
                hf, "query_num", tower_width=tower.width, positions=Positions.KEYS_AND_QUERIES
            ),
            side=square_side(resolution, patch, "scale_resolution"),
        )

    def build(self) -> MiniCPMV2Vision:
        """Returns the module."""
        return MiniCPMV2Vision(self)


class MiniCPMV2Vision(ResampledTimm):
    """The vision model. The original computes each tile alone."""
