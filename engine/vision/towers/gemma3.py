"""Gemma 3's vision model: SigLIP, the mean of each square of patches, a norm, and a projection.

An image is one tile. Its patches are averaged in squares, so that `mm_tokens_per_image` rows are left, which a norm
with weights next to 1 and a matrix of [tower's width, decoder's width] turn into features.

Legend: N images, V the tower's width, K feature rows, C the decoder's width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch
from einops import reduce
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from engine.errors import UserError
from engine.vision.tower_defaults import SIGLIP
from engine.vision.towers.siglip import SiglipConfig, SiglipTower
from engine.vision.towers.sizes import Grid, Grids, check_grids, counts_from_hf, vision_part
from engine.vision.towers.tiles import run_by_length


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemma3VisionConfig:
    """Sizes of tower and projector.

    Args:
        side: feature rows along a side of an image.
        width: C, of a feature row.
    """

    tower: SiglipConfig
    side: int
    width: int

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], width: int) -> Gemma3VisionConfig:
        """Reads the `config.json` of a Gemma 3 with a vision tower.

        Args:
            width: C, of the language model that it describes.

        Raises:
            UserError: a size is missing, or the features do not divide an image into squares of patches.
        """
        vision = vision_part(hf)
        if (kind := vision["model_type"]) != SIGLIP:
            raise UserError(
                f"config.json has a vision tower of type {kind!r}, but a gemma3 model is supported with {SIGLIP}: use "
                "a model with that."
            )
        tower = SiglipConfig.from_hf(vision)
        count = counts_from_hf({"mm_tokens_per_image": 256, **hf}, ("mm_tokens_per_image",))["mm_tokens_per_image"]
        side = isqrt(count)
        if side**2 != count or tower.side % side:
            raise UserError(
                f"config.json has mm_tokens_per_image {count}, which are not the squares of an image of "
                f"{tower.side} x {tower.side} patches: correct it or copy it again."
            )
        return cls(tower=tower, side=side, width=width)

    def build(self) -> Gemma3Vision:
        """Returns the module."""
        return Gemma3Vision(self)

    @property
    def patch_features(self) -> int:
        """Numbers of a patch."""
        return self.tower.patch_features

    @property
    def usual_tile(self) -> tuple[int, int]:
        """Rows and columns, in patches, of every image."""
        return self.tower.usual_tile

    def num_features(self, grid: Grid) -> int:
        """Returns the feature rows of an image."""
        return self.side**2

    def flops(self, grids: Grids) -> int:
        """Returns the FLOPs of these images in forward."""
        projection = 2 * self.side**2 * self.tower.width * self.width
        return self.tower.encoder_flops(grids) + len(grids) * projection


class _Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (rms_norm(wide, wide.shape[-1:], eps=self.eps) * (1.0 + self.weight.to(wide.dtype))).to(x.dtype)


class _Projector(nn.Module):
    def __init__(self, config: Gemma3VisionConfig) -> None:
        super().__init__()
        self.square = config.tower.side // config.side
        self.mm_input_projection_weight = nn.Parameter(torch.empty(config.tower.width, config.width))
        self.mm_soft_emb_norm = _Norm(config.tower.width, config.tower.norm_eps)

    def forward(self, x_NLV: Tensor) -> Tensor:
        side = isqrt(x_NLV.shape[1]) // self.square
        squares = reduce(x_NLV, "n (h p w q) v -> n (h w) v", "mean", p=self.square, w=side, q=self.square)
        features: Tensor = self.mm_soft_emb_norm(squares) @ self.mm_input_projection_weight
        return features


class Gemma3Vision(nn.Module):
    """Tower and projector."""

    def __init__(self, config: Gemma3VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.vision_tower = SiglipTower(config.tower)
        self.multi_modal_projector = _Projector(config)

    def forward(self, patches_PF: Tensor, grids: Grids) -> Tensor:
        """Returns the feature rows of all images, [K, C], image after image and row by row.

        Args:
            patches_PF: image after image, each row by row, flattened as (channel, y, x), normalised.
            grids: rows and columns of each image, which are those of the config.
        """
        check_grids(grids, self.config.tower.side)
        return run_by_length(patches_PF, grids, self._features, self.config.width)

    def _features(self, patches_NLF: Tensor, grids: Grids) -> Tensor:
        features: Tensor = self.multi_modal_projector(self.vision_tower(patches_NLF))
        return features
