"""MiniCPM-V 4.6 and 4.7: SigLIP for tiles of any shape, whose patches become fewer twice.

Behind one of the tower's layers, windows of 2 x 2 patches become one each: the four attend to each other, and an MLP of
all four is added to their mean. The layers behind it run on a quarter of the patches. Behind the tower, blocks of 2 x 2
become one feature row each. With `downsample_mode` "4x" the first of the two is left out.

    window merger   y_4 = x_4 + attention(norm(x_4))      x' = mean(y_4) + W_2 gelu_tanh(W_1 norm(concat(y_4)))
    merger          f = U_2 gelu(U_1 norm(concat(x'_4)))

Layers and attention are transformers' SigLIP; embeddings and mergers are ours, because patches come flattened and their
grids are on the host.

Legend: N tiles, L patches of a tile, F = 3 * patch ** 2, V width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from engine.errors import UserError
from engine.layers.host_copies import sent
from engine.vision.tower_defaults import merging_tower
from engine.vision.towers.encoders import EncoderConfig, sizes_from_hf
from engine.vision.towers.sizes import Grid, Grids
from engine.vision.towers.tiles import encoder_flops, positions_of, run_by_length

_SIDE = 2
"""Patches on a side of a window, and of a block that becomes a feature row."""
_AREA = _SIDE**2
_PROJECTOR_EPS = 1e-6
_USUAL_PIXELS = 448


@dataclass(frozen=True, kw_only=True, slots=True)
class MiniCPMV46VisionConfig(EncoderConfig):
    """Sizes of tower and mergers; `side` is that of the stored table of positions.

    Args:
        window_behind: layer behind which windows are merged; None where they are not.
        hidden: of the language model.
    """

    window_behind: int | None
    hidden: int

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], hidden: int) -> MiniCPMV46VisionConfig:
        """Reads a `config.json`.

        Args:
            hidden: of the language model.

        Raises:
            UserError: there is no tower, a size is missing or does not fit, or it merges otherwise.
        """
        tower = merging_tower(hf)
        if tower is None:
            raise UserError("config.json lacks vision_config, which describes the vision tower: copy it again.")
        for place, part, key, value in (
            ("", hf, "merge_kernel_size", [_SIDE, _SIDE]),
            ("", hf, "merger_times", 1),
            ("vision_config.", tower.vision, "window_kernel_size", [_SIDE, _SIDE]),
        ):
            given = part.get(key, value)
            if (list(given) if isinstance(given, list | tuple) else given) != value:
                raise UserError(
                    f"config.json has {place}{key} {given!r}, but this model's tower has {value!r}: use a model with "
                    "that."
                )
        sizes = sizes_from_hf(tower.vision)
        if tower.window_behind is not None and tower.window_behind not in range(sizes["num_layers"]):
            raise UserError(
                f"config.json has insert_layer_id {tower.window_behind}, but one of the tower's {sizes['num_layers']} "
                "layers, counted from 0, is expected: correct it or copy it again."
            )
        return cls(**sizes, window_behind=tower.window_behind, hidden=hidden)

    def build(self) -> nn.Module:
        """Returns the module."""
        return MiniCPMV46Vision(self)

    @property
    def factor(self) -> int:
        """Patches on a side of what becomes a feature row."""
        return _SIDE if self.window_behind is None else _SIDE**2

    @property
    def usual_tile(self) -> tuple[int, int]:
        """Rows and columns, in patches, of a square slice."""
        side = max(round(_USUAL_PIXELS / self.patch / self.factor), 1) * self.factor
        return side, side

    def num_features(self, grid: Grid) -> int:
        """Returns the feature rows of a tile."""
        return grid[0] * grid[1] // self.factor**2

    def flops(self, grids: Grids) -> int:
        """Returns the FLOPs of these tiles in forward."""
        lengths = [rows * columns for rows, columns in grids]
        sizes = {"width": self.width, "mlp_width": self.mlp_width}
        total = 2 * sum(lengths) * self.patch_features * self.width
        before = self.num_layers if self.window_behind is None else self.window_behind + 1
        total += encoder_flops(lengths, **sizes, depth=before)
        if self.window_behind is not None:
            attention = 2 * self.width * 4 * self.width + 4 * _AREA * self.width
            lengths = [length // _AREA for length in lengths]
            total += sum(lengths) * (_AREA * attention + 2 * _AREA * self.mlp_width * (_AREA + 1) * self.width)
            total += encoder_flops(lengths, **sizes, depth=self.num_layers - before)
        wide = _AREA * self.width
        return total + sum(map(self.num_features, grids)) * 2 * wide * (wide + self.hidden)


def nearest_places(count: int, side: int) -> Tensor:
    """Returns which of `side` places on an axis each of `count` patches has: int64 [count], on the host."""
    shares = torch.arange(count, device="cpu") / count
    bounds = torch.arange(1 / side, 1.0, 1 / side, device="cpu")
    return torch.bucketize(shares, bounds, right=True)


def _blocks(x_NLV: Tensor, grids: Grids) -> Tensor:
    """Returns the patches of each block side by side, blocks row by row: [N, L / 4, 4, V]."""
    pattern = "(r a c b) v -> (r c) (a b) v"
    if len(set(grids)) == 1:
        return rearrange(x_NLV, f"n {pattern.replace('->', '-> n')}", a=_SIDE, b=_SIDE, r=grids[0][0] // _SIDE)
    blocks = [
        rearrange(x_LV, pattern, a=_SIDE, b=_SIDE, r=grid[0] // _SIDE) for x_LV, grid in zip(x_NLV, grids, strict=True)
    ]
    return torch.stack(blocks)


class _Embeddings(nn.Module):
    def __init__(self, config: MiniCPMV46VisionConfig) -> None:
        super().__init__()
        self.side = config.side
        self.patch_embedding = nn.Conv2d(3, config.width, config.patch, config.patch)
        self.position_embedding = nn.Embedding(config.side**2, config.width)

    def forward(self, patches_NLF: Tensor, grids: Grids) -> Tensor:
        x = linear(patches_NLF, self.patch_embedding.weight.flatten(1), self.patch_embedding.bias)
        return x + positions_of(grids, lambda grid: self.position_embedding(self._places(grid, x.device)))

    def _places(self, grid: Grid, device: torch.device) -> Tensor:
        down, across = (nearest_places(count, self.side) for count in grid)
        return sent((down[:, None] * self.side + across).flatten(), device)


class _WindowMerger(nn.Module):
    def __init__(self, config: MiniCPMV46VisionConfig, stock: Any) -> None:
        super().__init__()
        from transformers.models.siglip.modeling_siglip import SiglipAttention

        wide = _AREA * config.width
        self.self_attn = SiglipAttention(stock)
        self.layer_norm1 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.pre_norm = nn.LayerNorm(wide, eps=config.norm_eps)
        self.linear_1 = nn.Linear(wide, _AREA * config.mlp_width)
        self.linear_2 = nn.Linear(_AREA * config.mlp_width, config.width)

    def forward(self, x_NLV: Tensor, grids: Grids) -> Tensor:
        """Returns [N, L / 4, V]."""
        windows = _blocks(x_NLV, grids)
        x = windows.flatten(0, 1)
        x = x + self.self_attn(self.layer_norm1(x))[0]
        y: Tensor = self.linear_2(gelu(self.linear_1(self.pre_norm(x.flatten(1))), approximate="tanh"))
        return (y + x.mean(dim=1)).unflatten(0, windows.shape[:2])


class _Tower(nn.Module):
    def __init__(self, config: MiniCPMV46VisionConfig) -> None:
        super().__init__()
        from transformers.models.siglip.configuration_siglip import SiglipVisionConfig
        from transformers.models.siglip.modeling_siglip import SiglipEncoder

        stock = SiglipVisionConfig(**config.stock)
        self.window_behind = config.window_behind
        self.embeddings = _Embeddings(config)
        self.encoder = SiglipEncoder(stock)
        self.post_layernorm = nn.LayerNorm(config.width, eps=config.norm_eps)
        if config.window_behind is not None:
            self.vit_merger = _WindowMerger(config, stock)

    def forward(self, patches_NLF: Tensor, grids: Grids) -> tuple[Tensor, Grids]:
        """Returns what the last norm makes of the last layer, and its grids."""
        x = self.embeddings(patches_NLF, grids)
        for number, layer in enumerate(self.encoder.layers):
            x = layer(x, None)
            if number == self.window_behind:
                x = self.vit_merger(x, grids)
                grids = tuple((rows // _SIDE, columns // _SIDE) for rows, columns in grids)
        return self.post_layernorm(x), grids


class _Projector(nn.Module):
    def __init__(self, config: MiniCPMV46VisionConfig) -> None:
        super().__init__()
        wide = _AREA * config.width
        self.pre_norm = nn.LayerNorm(wide, eps=_PROJECTOR_EPS)
        self.linear_1 = nn.Linear(wide, wide)
        self.linear_2 = nn.Linear(wide, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear_2(gelu(self.linear_1(self.pre_norm(x))))
        return y


class _Merger(nn.Module):
    def __init__(self, config: MiniCPMV46VisionConfig) -> None:
        super().__init__()
        self.mlp = nn.ModuleList([_Projector(config)])

    def forward(self, x_NLV: Tensor, grids: Grids) -> Tensor:
        features: Tensor = self.mlp[0](_blocks(x_NLV, grids).flatten(2))
        return features


class MiniCPMV46Vision(nn.Module):
    """Tower and merger."""

    def __init__(self, config: MiniCPMV46VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.vision_tower = _Tower(config)
        self.merger = _Merger(config)

    def forward(self, patches_PF: Tensor, grids: Grids) -> Tensor:
        """Returns the feature rows of all tiles, [K, hidden], tile after tile and row by row.

        Args:
            patches_PF: tile after tile, each row by row, flattened as (channel, y, x), normalised.
            grids: rows and columns of each, in patches.

        Raises:
            ValueError: a tile does not divide into what becomes a feature row.
        """
        factor = self.config.factor
        for rows, columns in grids:
            if rows % factor or columns % factor:
                raise ValueError(
                    f"a tile of {rows} x {columns} patches came to a tower that merges {factor} x {factor}"
                )
        return run_by_length(patches_PF, grids, self._features, self.config.hidden)

    def _features(self, patches_NLF: Tensor, grids: Grids) -> Tensor:
        features: Tensor = self.merger(*self.vision_tower(patches_NLF, grids))
        return features
