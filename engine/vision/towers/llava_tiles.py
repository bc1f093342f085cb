"""LLaVA-NeXT and LLaVA-OneVision: images as one tile and a grid of tiles, whose features are joined to one map
without its padding.

The grid of an image has (rows, columns) of patches, all tiles one below the other, and behind that, where it is in
several tiles, (rows, columns) of the tiles but the first, (rows, columns) of features without padding, and (rows,
columns) that these are scaled to.

Legend: N tiles, L patches of each, F numbers of a patch, D the decoder's width, H and W rows and columns of features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import interpolate

from engine.errors import UserError
from engine.vision.towers.clip import ClipConfig
from engine.vision.towers.llava import LlavaVisionConfig, Projector
from engine.vision.towers.siglip import SiglipConfig
from engine.vision.towers.sizes import Grid, Grids

_DEFAULTS = {"llava_onevision": {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}}
"""By model_type: what config.json leaves out, where it is not what LLaVA 1.5 has."""
_TILES_OF_AN_IMAGE = 2
"""On a side, of the image that stands for all in plans."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TiledLlavaConfig:
    """Sizes of tower and projector.

    Args:
        tiles: what makes the features of tiles.
    """

    tiles: LlavaVisionConfig

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], width: int) -> TiledLlavaConfig:
        """Reads a `config.json`.

        Args:
            width: of the decoder.

        Raises:
            UserError: it has another kind of tower, or something is missing or does not fit.
        """
        tiles = LlavaVisionConfig.from_hf({**_DEFAULTS.get(hf["model_type"], {}), **hf}, width)
        if tiles.rows_per_tile != tiles.tower.side**2:
            raise UserError(
                f"config.json makes {tiles.rows_per_tile} features of a tile of {tiles.tower.side} x "
                f"{tiles.tower.side} patches, but one for each is expected: correct vision_feature_select_strategy."
            )
        return cls(tiles=tiles)

    @property
    def tower(self) -> ClipConfig | SiglipConfig:
        return self.tiles.tower

    def build(self) -> TiledLlava:
        """Returns the module."""
        return TiledLlava(self)

    @property
    def patch_features(self) -> int:
        """Numbers of a patch."""
        return self.tiles.patch_features

    @property
    def usual_tile(self) -> tuple[int, ...]:
        """The grid of a square image in four tiles and the one of the whole."""
        side, count = self.tower.side, _TILES_OF_AN_IMAGE
        whole = (count * side,) * 2
        return ((1 + count**2) * side, side, count, count, *whole, *whole)

    def num_features(self, grid: Grid) -> int:
        """Returns the feature rows of an image."""
        if len(grid) == 2:
            return self.tiles.rows_per_tile + 1
        return self.tiles.rows_per_tile + grid[6] * (grid[7] + 1)

    def flops(self, grids: Grids) -> int:
        """Returns the FLOPs of these images in forward."""
        return self.tiles.flops(((self.tower.side,) * 2,) * sum(self._num_tiles(grid) for grid in grids))

    def _num_tiles(self, grid: Grid) -> int:
        return grid[0] // self.tower.side


class _Newline(nn.Module):
    """The row that marks the end of a row of features; in a checkpoint a parameter by itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))


class TiledLlava(nn.Module):
    """Tower, projector and the joining of tiles."""

    def __init__(self, config: TiledLlavaConfig) -> None:
        super().__init__()
        self.config = config
        self.vision_tower = config.tower.build()
        self.multi_modal_projector = Projector(config.tiles.projector)
        self.image_newline = _Newline(config.tiles.projector.width)

    def forward(self, patches_PF: Tensor, grids: Grids) -> Tensor:
        """Returns the feature rows of all images, [K, D].

        Args:
            patches_PF: image after image, tile after tile, each row by row, flattened as (channel, y, x),
                normalised.
            grids: of each image.
        """
        width = self.config.tiles.projector.width
        if not grids:
            return patches_PF.new_empty(0, width)
        side = self.config.tower.side
        for grid in grids:
            if grid[1] != side or grid[0] % side:
                raise ValueError(f"tiles of {grid[0]} x {grid[1]} patches came to a tower of {side} x {side}")
        patches_NLF = rearrange(patches_PF, "(n l) f -> n l f", l=side**2)
        outputs = self.vision_tower(patches_NLF, self.config.tiles.states)
        features_NLD = self.multi_modal_projector(outputs[:, self.config.tiles.first :])
        images = features_NLD.split([grid[0] // side for grid in grids])
        return torch.cat([self._joined(tiles, grid) for tiles, grid in zip(images, grids, strict=True)])

    def _joined(self, tiles_NLD: Tensor, grid: Grid) -> Tensor:
        """Returns the features of an image: those of the whole, and the rows of the map of the other tiles."""
        newline = self.image_newline.weight
        if len(grid) == 2:
            return torch.cat([tiles_NLD[0], newline[None]])
        down, across, rows, columns, scaled_rows, scaled_columns = grid[2:]
        side = self.config.tower.side
        map_DHW = rearrange(tiles_NLD[1:], "(i j) (h w) d -> d (i h) (j w)", i=down, j=across, h=side, w=side)
        top, left = (down * side - rows) // 2, (across * side - columns) // 2
        map_DHW = map_DHW[:, top : top + rows, left : left + columns]
        if (scaled_rows, scaled_columns) != (rows, columns):
            map_DHW = interpolate(map_DHW[None], (scaled_rows, scaled_columns), mode="bilinear")[0]
        marks = newline[:, None, None].expand(-1, scaled_rows, 1)
        lines = rearrange(torch.cat([map_DHW, marks], dim=-1), "d h w -> (h w) d")
        return torch.cat([tiles_NLD[0], lines])
