"""MiniCPM-V 2.0: timm's SigLIP without its last block, and a resampler with a stored position for each query."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from engine.errors import UserError
from engine.models.vision.resampler import Positions, Resampler, ResamplerConfig
from engine.models.vision.sizes import Grid, Grids, counts_from_hf, square_side
from engine.models.vision.tiles import run_by_length
from engine.models.vision.timm_vit import (
    SIGLIP_SO400M_384,
    TimmViT,
    TimmViTConfig,
    timm_vit_from_hf,
    tower_sizes,
)

CHECKPOINT_PREFIX = ""
"""What precedes the parameters' names in a checkpoint."""

_TOWER = "vit_so400m_patch14_siglip_384"


@dataclass(frozen=True, kw_only=True, slots=True)
class MiniCPMV2VisionConfig:
    """Sizes of tower and resampler.

    Args:
        slice_side: patches on a side of a square slice.
    """

    tower: TimmViTConfig
    resampler: ResamplerConfig
    slice_side: int

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
        return cls(
            tower=tower,
            resampler=ResamplerConfig.from_hf(
                hf, "query_num", tower_width=tower.width, positions=Positions.KEYS_AND_QUERIES
            ),
            slice_side=square_side(int(hf.get("scale_resolution", 448)), patch, "scale_resolution"),
        )

    def build(self) -> MiniCPMV2Vision:
        """Returns the module."""
        return MiniCPMV2Vision(self)

    @property
    def rows_per_tile(self) -> int:
        """Feature rows of one tile."""
        return self.resampler.num_queries

    @property
    def patch_features(self) -> int:
        """Numbers of a patch."""
        return 3 * self.tower.patch**2

    @property
    def usual_tile(self) -> tuple[int, int]:
        """Rows and columns, in patches, of a slice, which most tiles are."""
        return self.slice_side, self.slice_side

    def num_features(self, grid: Grid) -> int:
        """Returns the feature rows of a tile."""
        return self.rows_per_tile

    def flops(self, grids: Grids) -> int:
        """Returns the FLOPs of these tiles in forward."""
        return self.tower.flops(grids) + self.resampler.flops(grids)


class MiniCPMV2Vision(nn.Module):
    """Tower and resampler. Tiles may have any size; the original computes each alone."""

    def __init__(self, config: MiniCPMV2VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.vpm = TimmViT(config.tower)
        self.resampler = Resampler(config.resampler)

    def forward(self, patches_PF: Tensor, grids: Grids) -> Tensor:
        """Returns the feature rows of all tiles: [tiles * queries, decoder's width].

        Args:
            patches_PF: tile after tile, each row by row, flattened as (channel, y, x), normalised.
            grids: rows and columns of each tile.
        """
        return run_by_length(patches_PF, grids, self._features, self.config.resampler.width)

    def _features(self, patches_NLF: Tensor, grids: Grids) -> Tensor:
        return self.resampler(self.vpm(patches_NLF, grids), grids)
