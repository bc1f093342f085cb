"""Qwen3-VL's tower, and Qwen3.5's: a position table that is interpolated, and mergers behind some of Qwen3-VL's blocks,
whose features later layers of the language model take (DeepStack, arXiv 2406.04334).

Blocks and mergers are transformers'.

Legend: P patches of all images, F = 3 * 2 * patch ** 2, K feature rows, L mergers behind blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from engine.errors import UserError
from engine.layers.host_copies import sent
from engine.vision.towers.qwen import (
    KEPT_TABLES,
    AxialRotation,
    MergedImages,
    MergedVision,
    PatchEmbed,
    block_places,
    merged_from_hf,
    segment_blocks,
    segments_of,
)
from engine.vision.towers.sizes import Grids, counts_from_hf, vision_part
from engine.vision.towers.tiles import encoder_flops


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3VisionConfig(MergedImages):
    """Sizes of the tower.

    Args:
        table_side: positions on a side of the stored table.
        deepstack: blocks behind which a merger makes features for a later layer, the first one's for layer 0.
    """

    table_side: int
    deepstack: tuple[int, ...]

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], hidden: int) -> Qwen3VisionConfig:
        """Reads a `config.json`.

        Args:
            hidden: of the language model.

        Raises:
            UserError: there is no tower, or a size does not fit.
        """
        vision = vision_part(hf)
        sizes = merged_from_hf(vision, "gelu_pytorch_tanh", hidden)
        count = counts_from_hf(vision, ("num_position_embeddings",), "vision_config")["num_position_embeddings"]
        side = isqrt(count)
        if side**2 != count:
            raise UserError(
                f"config.json has vision_config.num_position_embeddings {count}, but a square table is expected: "
                "correct it or copy it again."
            )
        behind = vision.get("deepstack_visual_indexes", ())
        blocks = range(sizes["num_layers"])
        if not isinstance(behind, list | tuple) or not all(one in blocks for one in behind):
            raise UserError(
                f"config.json has vision_config.deepstack_visual_indexes {behind}, but a list of numbers below the "
                f"tower's depth of {len(blocks)} is expected: correct it or copy it again."
            )
        return cls(
            **sizes,
            table_side=side,
            deepstack=tuple(behind),
        )

    @property
    def num_levels(self) -> int:
        return 1 + len(self.deepstack)

    def build(self) -> nn.Module:
        """Returns the module."""
        return MergedVision(self, _Tower(self))

    def flops(self, grids: Grids) -> int:
        """Returns the FLOPs of these images in forward."""
        lengths = [rows * columns for rows, columns in grids]
        wide = self.width * self.merge**2
        mergers = self.num_levels * 2 * wide * (wide + self.hidden)
        blocks = encoder_flops(lengths, width=self.width, mlp_width=self.mlp_width, depth=self.num_layers)
        embedding = 2 * sum(lengths) * self.patch_features * self.width
        return embedding + blocks + sum(map(self.num_features, grids)) * mergers


def _taps(places: Tensor, size: int, side: int) -> tuple[Tensor, Tensor]:
    """Returns the two neighbours in a table of `side` positions, and their weights, of places among `size` that are
    spread over it from end to end: [P, 2] each."""
    at = places.float() * (side - 1) / max(size - 1, 1)
    below = at.floor()
    neighbours = torch.stack([below, below + 1], dim=1)
    weights = 1 - (at[:, None] - neighbours).abs()
    return neighbours.long().clamp(max=side - 1), weights


@lru_cache(maxsize=KEPT_TABLES)
def interpolation(grid: tuple[int, int], merge: int, side: int) -> tuple[Tensor, Tensor]:
    """Returns the four neighbours of each patch in a table of side x side positions, and their weights: int64 and fp32
    [rows * columns, 4], in the order of merged blocks, on the host, to be read only."""
    row, column = block_places(grid, merge).unbind(1)
    (down, own_down), (across, own_across) = _taps(row, grid[0], side), _taps(column, grid[1], side)
    indices = rearrange(down, "p a -> p a 1") * side + rearrange(across, "p b -> p 1 b")
    weights = rearrange(own_down, "p a -> p a 1") * rearrange(own_across, "p b -> p 1 b")
    return indices.flatten(1), weights.flatten(1)


class _Tower(nn.Module):
    def __init__(self, config: Qwen3VisionConfig) -> None:
        super().__init__()
        from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
        from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionBlock, Qwen3VLVisionPatchMerger

        self._config = config
        theirs = Qwen3VLVisionConfig(
            **config.stock,
            spatial_merge_size=config.merge,
            out_hidden_size=config.hidden,
        )
        self.patch_embed = PatchEmbed(config.width, config.patch, bias=True)
        self.pos_embed = nn.Embedding(config.table_side**2, config.width)
        self.rotation = AxialRotation(config.width // config.num_heads, config.theta)
        self.blocks = segment_blocks(Qwen3VLVisionBlock, theirs, config.num_layers)
        self.merger = Qwen3VLVisionPatchMerger(theirs)
        self.deepstack_merger_list = nn.ModuleList(
            Qwen3VLVisionPatchMerger(theirs, use_postshuffle_norm=True) for _ in config.deepstack
        )

    def forward(self, patches_PF: Tensor, grids: Grids) -> Tensor:
        config, device = self._config, patches_PF.device
        tables = [interpolation(grid, config.merge, config.table_side) for grid in grids]
        indices, weights = (sent(torch.cat(one), device) for one in zip(*tables, strict=True))
        places_P2 = torch.cat([block_places(grid, config.merge) for grid in grids])
        rotation = self.rotation(sent(places_P2, device))
        x = self.patch_embed(patches_PF)
        x = x + (self.pos_embed(indices) * weights[..., None]).sum(1).to(x.dtype)
        segments, features = segments_of([rows * columns for rows, columns in grids]), []
        for index, block in enumerate(self.blocks):
            x = block(x, cu_seqlens=segments, position_embeddings=rotation)
            if index in config.deepstack:
                features.append(self.deepstack_merger_list[config.deepstack.index(index)](x))
        return torch.cat([self.merger(x), *features], dim=1)
