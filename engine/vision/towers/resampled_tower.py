"""A tower whose patches a resampler turns into the same number of feature rows for any tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from engine.vision.towers.resampler import Resampler, ResamplerConfig
from engine.vision.towers.sizes import Grid, Grids
from engine.vision.towers.tiles import run_by_length
from engine.vision.towers.timm_vit import TimmViT, TimmViTConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ResampledTowerConfig:
    """Sizes that every such tower has.

    Args:
        side: patches on a side of the square tile that is usual; others are computed too.
    """

    resampler: ResamplerConfig
    side: int

    @property
    def rows_per_tile(self) -> int:
        """Feature rows of one tile."""
        return self.resampler.num_queries

    @property
    def usual_tile(self) -> tuple[int, int]:
        """Rows and columns, in patches, of most tiles."""
        return self.side, self.side

    def num_features(self, grid: Grid) -> int:
        """Returns the feature rows of a tile."""
        return self.rows_per_tile


@dataclass(frozen=True, kw_only=True, slots=True)
class ResampledTimmConfig(ResampledTowerConfig):
    """Sizes with a tower of timm."""

    tower: TimmViTConfig

    @property
    def patch_features(self) -> int:
        """Numbers of a patch."""
        return 3 * self.tower.patch**2

    def flops(self, grids: Grids) -> int:
        """Returns the FLOPs of these tiles in forward."""
        return self.tower.flops(grids) + self.resampler.flops(grids)


class ResampledTower(nn.Module):
    """Tower and resampler. Tiles may have any size: those with equally many patches are computed together."""

    tower_name: ClassVar[str] = "vpm"
    """The tower's name in a checkpoint."""

    def __init__(self, config: ResampledTowerConfig, tower: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.add_module(self.tower_name, tower)
        self.resampler = Resampler(config.resampler)

    def forward(self, patches_PF: Tensor, grids: Grids) -> Tensor:
        """Returns the feature rows of all tiles: [tiles * queries, decoder's width].

        Args:
            patches_PF: tile after tile, each row by row, flattened as (channel, y, x), normalised.
            grids: rows and columns of each tile.
        """
        return run_by_length(patches_PF, grids, self._features, self.config.resampler.width)

    def _features(self, patches_NLF: Tensor, grids: Grids) -> Tensor:
        features_NLV = self.get_submodule(self.tower_name)(patches_NLF, grids)
        return self.resampler(features_NLV, tuple(grid[:2] for grid in grids))


class ResampledTimm(ResampledTower):
    """A tower of timm and its resampler."""

    def __init__(self, config: ResampledTimmConfig) -> None:
        super().__init__(config, TimmViT(config.tower))
