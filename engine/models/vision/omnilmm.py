"""OmniLMM: timm's EVA02-E CLIP "plus" without its last block, and a resampler with one table for queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from engine.models.vision.resampler import Positions, Resampler, ResamplerConfig
from engine.models.vision.sizes import Grid, Grids, check_grids, counts_from_hf, square_side
from engine.models.vision.tiles import run_by_length
from engine.models.vision.timm_vit import EVA02_ENORMOUS_PLUS_224, TimmViT, TimmViTConfig, timm_vit_from_hf

CHECKPOINT_PREFIX = "model."
"""What precedes the parameters' names in a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OmniLMMVisionConfig:
    """Sizes of tower and resampler.

    Args:
        side: patches on a side of a picture as the processor makes it; other squares are computed too.
    """

    tower: TimmViTConfig
    resampler: ResamplerConfig
    side: int

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

    @property
    def rows_per_tile(self) -> int:
        """Feature rows of one picture."""
        return self.resampler.num_queries

    @property
    def patch_features(self) -> int:
        """Numbers of a patch."""
        return 3 * self.tower.patch**2

    @property
    def usual_tile(self) -> tuple[int, int]:
        """Rows and columns, in patches, of a picture."""
        return self.side, self.side

    def num_features(self, grid: Grid) -> int:
        """Returns the feature rows of a tile."""
        return self.rows_per_tile

    def flops(self, grids: Grids) -> int:
        """Returns the FLOPs of these pictures in forward."""
        return self.tower.flops(grids) + self.resampler.flops(grids)


class OmniLMMVision(nn.Module):
    """Tower and resampler for square pictures."""

    def __init__(self, config: OmniLMMVisionConfig) -> None:
        super().__init__()
        self.config = config
        self.vision_tower = TimmViT(config.tower)
        self.resampler = Resampler(config.resampler)

    def forward(self, patches_PF: Tensor, grids: Grids) -> Tensor:
        """Returns the feature rows of all pictures: [pictures * queries, decoder's width].

        Args:
            patches_PF: picture after picture, each row by row, flattened as (channel, y, x), normalised.
            grids: rows and columns of each picture, which are equal.
        """
        for grid in grids:
            check_grids((grid,), grid[0])
        return run_by_length(patches_PF, grids, self._features, self.config.resampler.width)

    def _features(self, patches_NLF: Tensor, grids: Grids) -> Tensor:
        return self.resampler(self.vision_tower(patches_NLF, grids), grids)
