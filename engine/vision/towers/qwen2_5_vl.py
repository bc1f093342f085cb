"""Qwen2.5-VL's tower: attention within windows in most blocks, and a merger of 2 x 2 patches.

Blocks and merger are transformers'. Patches are put in the order of their windows once, and features back at the end.
Windows of one image are sorted by their length, whole ones first, so that attention runs those of one length as one
batch; no number depends on the order of windows.

Legend: P patches of all images, F = 3 * 2 * patch ** 2, K feature rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen25VisionConfig(MergedImages):
    """Sizes of the tower.

    Args:
        window: merged blocks on a side of a window.
        whole: blocks whose attention sees the whole image.
    """

    window: int
    whole: tuple[int, ...]

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], hidden: int) -> Qwen25VisionConfig:
        """Reads a `config.json`.

        Args:
            hidden: of the language model.

        Raises:
            UserError: there is no tower, or a size does not fit.
        """
        vision = vision_part(hf)
        sizes = merged_from_hf(vision, "silu", hidden)
        side = counts_from_hf(vision, ("window_size",), "vision_config")["window_size"]
        window = side // sizes["merge"] // sizes["patch"]
        whole = vision["fullatt_block_indexes"]
        if window == 0 or not isinstance(whole, list | tuple) or not all(isinstance(one, int) for one in whole):
            raise UserError(
                f"config.json has vision_config.window_size {side} and fullatt_block_indexes {whole}, "
                "but windows of at least one merged block and a list of numbers are expected: correct it or copy it "
                "again."
            )
        return cls(
            **sizes,
            window=window,
            whole=tuple(whole),
        )

    def build(self) -> nn.Module:
        """Returns the module."""
        return MergedVision(self, _Tower(self))

    def flops(self, grids: Grids) -> int:
        """Returns the FLOPs of these images in forward."""
        total = 0
        for rows, columns in grids:
            patches = rows * columns
            seen = sum(length**2 for length in windows((rows, columns), self).lengths)
            within = sum(patches**2 if block in self.whole else seen for block in range(self.num_layers))
            linears = self.num_layers * 2 * self.width * (4 * self.width + 3 * self.mlp_width)
            wide = self.width * self.merge**2
            merger = 2 * wide * (wide + self.hidden)
            total += patches * (linears + 2 * self.patch_features * self.width)
            total += 4 * within * self.width + self.num_features((rows, columns)) * merger
        return total


class Windows(NamedTuple):
    """The windows of an image, on the host, to be read only.

    Args:
        patches_P: int64, the image's patches in the order of its windows.
        places_P2: int64, their rows and columns.
        back_K: int64, for each merged block its place in that order.
        lengths: patches of each window.
    """

    patches_P: Tensor
    places_P2: Tensor
    back_K: Tensor
    lengths: tuple[int, ...]


@lru_cache(maxsize=KEPT_TABLES)
def windows(grid: tuple[int, int], config: Qwen25VisionConfig) -> Windows:
    """Returns the windows of an image of this size, in patches."""
    rows, columns = (side // config.merge for side in grid)
    blocks, merged = torch.arange(rows * columns, device="cpu").view(rows, columns), config.merge**2
    found = [part.flatten() for strip in blocks.split(config.window) for part in strip.split(config.window, dim=1)]
    found.sort(key=len, reverse=True)
    order_K = torch.cat(found)
    patches_P = (order_K[:, None] * merged + torch.arange(merged, device="cpu")).flatten()
    return Windows(
        patches_P=patches_P,
        places_P2=block_places(grid, config.merge)[patches_P],
        back_K=order_K.argsort(),
        lengths=tuple(len(window) * merged for window in found),
    )


class _Tower(nn.Module):
    def __init__(self, config: Qwen25VisionConfig) -> None:
        super().__init__()
        from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLPatchMerger, Qwen2_5_VLVisionBlock

        self._config = config
        theirs = Qwen2_5_VLVisionConfig(**config.stock)
        self.patch_embed = PatchEmbed(config.width, config.patch, bias=False)
        self.rotation = AxialRotation(config.width // config.num_heads, config.theta)
        self.blocks = segment_blocks(Qwen2_5_VLVisionBlock, theirs, config.num_layers)
        self.merger = Qwen2_5_VLPatchMerger(
            dim=config.hidden, context_dim=config.width, spatial_merge_size=config.merge
        )

    def forward(self, patches_PF: Tensor, grids: Grids) -> Tensor:
        config, device, lengths = self._config, patches_PF.device, [rows * columns for rows, columns in grids]
        found = [windows(grid, config) for grid in grids]
        first = list(accumulate(lengths, initial=0))
        patches_P = torch.cat([one.patches_P + start for one, start in zip(found, first, strict=False)])
        back_K = torch.cat([one.back_K + start // config.merge**2 for one, start in zip(found, first, strict=False)])
        rotation = self.rotation(sent(torch.cat([one.places_P2 for one in found]), device))
        x = self.patch_embed(patches_PF.index_select(0, sent(patches_P, device)))
        back_K = sent(back_K, device)
        whole, window = segments_of(lengths), segments_of([length for one in found for length in one.lengths])
        for index, block in enumerate(self.blocks):
            segments = whole if index in config.whole else window
            x = block(x, cu_seqlens=segments, position_embeddings=rotation)
        return self.merger(x).index_select(0, back_K)  # type: ignore[no-any-return]
