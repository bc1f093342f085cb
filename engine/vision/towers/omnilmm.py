"""OmniLMM: timm's EVA02-E CLIP "plus" without its last block, and a resampler with one table for queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engine.vision.towers.resampled_tower import ResampledTimm, ResampledTimmConfig
from engine.vision.towers.resampler import Positions, ResamplerConfig
from engine.vision.towers.sizes import Grids, check_grids, counts_from_hf, square_side
from engine.vision.towers.timm_vit import EVA02_ENORMOUS_PLUS_224, timm_vit_from_hf

CHECKPOINT_PREFIX = "model."
"""What precedes the parameters' names in a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OmniLMMVisionConfig(ResampledTimmConfig):
    """Sizes of tower and resampler; `side` is that of an image as the processor makes it."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> OmniLMMVisionConfig:
        """Reads a `config.json`; the original's code, too, has the tower's name in itself.

        Raises:
            UserError: a size is missing or does not fit.
        """
        tower = timm_vit_from_hf(hf, EVA02_ENORMOUS_PLUS_224, dropped=1)
        return cls(
            tower=tower,
            resampler=ResamplerConfig.from_hf(
                hf, "num_query", tower_width=tower.width, positions=Positions.QUERY_TABLE
            ),
            side=square_side(counts_from_hf(hf, ("image_size",))["image_size"], tower.patch, "image_size"),
        )

    def build(self) -> OmniLMMVision:
        """Returns the module."""
        return OmniLMMVision(self)


class OmniLMMVision(ResampledTimm):
    """The vision model, for square images."""

    tower_name = "vision_tower"

    def forward(self, patches_PF: Tensor, grids: Grids) -> Tensor:
        """Returns what `ResampledTower.forward` does, of images that are square.

        Raises:
            ValueError: one is not.
        """
        for grid in grids:
            check_grids((grid,), grid[0])
        return super().forward(patches_PF, grids)
