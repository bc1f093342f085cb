"""The tower of CogVLM, CogVLM2 and CogAgent: EVA2-CLIP-E with its norms behind attention and MLP, and a gated adapter.

A tile is one image of a fixed size. Its feature rows are boi, the patches' and eoi, which replace the embeddings of
as many tokens. CogVLM2 joins 2 x 2 patches by a convolution before the adapter. CogAgent adds a second table of
positions there, and has an encoder of larger images beside this tower (see engine.vision.towers.cogagent).

Legend: N tiles, P patches of all tiles, L positions of a tile (cls first), F = 3 * patch ** 2, V tower's width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention, silu

from engine.errors import UserError
from engine.vision.towers.parts import GeluMLP
from engine.vision.towers.sizes import (
    Grid,
    Grids,
    SquareTiles,
    check_grids,
    counts_from_hf,
    number_from_hf,
    square_side,
)

CHECKPOINT_PREFIX = "model."
"""What precedes the parameters' names in a checkpoint."""

_SIZES = ("hidden_size", "num_hidden_layers", "num_heads", "intermediate_size", "patch_size", "image_size")
_MERGE = 2
"""Patches on a side of what CogVLM2's convolution joins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CogVLMVisionConfig(SquareTiles):
    """Sizes of the tower and its adapter.

    Args:
        width, num_layers, num_heads, mlp_width: of the tower.
        norm_eps: of the tower's norms.
        hidden, adapter_width: of the decoder, and of the adapter's MLP.
        merges: 2 x 2 patches become one feature row (CogVLM2).
        second_positions: a table of positions is added to the tower's output (CogAgent).
    """

    width: int
    num_layers: int
    num_heads: int
    mlp_width: int
    norm_eps: float
    hidden: int
    adapter_width: int
    merges: bool = False
    second_positions: bool = False

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> CogVLMVisionConfig:
        """Reads the `config.json` of one of the three models.

        Raises:
            UserError: a size is missing or does not fit the others, or the tower's activation is another one.
        """
        vision = hf.get("vision_config")
        sizes = counts_from_hf(vision, _SIZES, "vision_config")
        decoder = counts_from_hf(hf, ("hidden_size", "intermediate_size"))
        assert isinstance(vision, Mapping)
        if (activation := vision.get("hidden_act", "gelu")) != "gelu":
            raise UserError(
                f"config.json has vision_config.hidden_act {activation!r}, but this tower's MLP computes 'gelu': use a "
                "model with that."
            )
        side = square_side(sizes["image_size"], sizes["patch_size"], "vision_config")
        if vision.get("num_positions", side**2 + 1) != side**2 + 1:
            raise UserError(
                f"config.json has vision_config.num_positions {vision['num_positions']}, but an image of "
                f"{sizes['image_size']} pixels has {side**2} patches and one class token: correct it or copy it again."
            )
        merges = hf.get("num_multi_query_heads") is not None  # which CogVLM2 alone has
        if merges and side % _MERGE:
            raise UserError(
                f"config.json has images of {side} x {side} patches, which do not divide into squares of 2 x 2: "
                "correct vision_config.image_size or copy it again."
            )
        return cls(
            width=sizes["hidden_size"],
            num_layers=sizes["num_hidden_layers"],
            num_heads=sizes["num_heads"],
            mlp_width=sizes["intermediate_size"],
            patch=sizes["patch_size"],
            side=side,
            norm_eps=number_from_hf({"layer_norm_eps": 1e-6, **vision}, "layer_norm_eps", "vision_config"),
            hidden=decoder["hidden_size"],
            adapter_width=decoder["intermediate_size"],
            merges=merges,
            second_positions=hf.get("cross_hidden_size") is not None,  # which CogAgent alone has
        )

    def build(self) -> CogVLMVision:
        """Returns the module."""
        return CogVLMVision(self)

    def flops(self, grids: Grids) -> int:
        """Returns the operations of a forward pass, two for each multiplication and addition."""
        width, patches = self.width, self.side**2
        positions, rows = patches + 1, self.rows_per_tile - 2
        layer = positions * width * (4 * width + 2 * self.mlp_width) + 2 * positions**2 * width
        merge = rows * (_MERGE * width) ** 2 if self.merges else 0
        adapter = rows * self.hidden * (width + 3 * self.adapter_width)
        embedding = patches * 3 * self.patch**2 * width
        return 2 * len(grids) * (embedding + self.num_layers * layer + merge + adapter)

    @property
    def rows_per_tile(self) -> int:
        """Feature rows of one image, boi and eoi among them."""
        return (self.side // _MERGE if self.merges else self.side) ** 2 + 2

    def num_features(self, grid: Grid) -> int:
        """Returns the feature rows of a tile."""
        return self.rows_per_tile


class _PatchEmbedding(nn.Module):
    def __init__(self, config: CogVLMVisionConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, config.width, config.patch, config.patch)
        self.cls_embedding = nn.Parameter(torch.zeros(1, config.width))
        self.position_embedding = nn.Embedding(config.side**2 + 1, config.width)

    def forward(self, patches_PF: Tensor) -> Tensor:
        x = linear(patches_PF, self.proj.weight.flatten(1), self.proj.bias)
        x = rearrange(x, "(n p) v -> n p v", p=self.position_embedding.num_embeddings - 1)
        cls = self.cls_embedding.expand(x.shape[0], 1, -1)
        return torch.cat((cls, x), dim=1) + self.position_embedding.weight


class _Attention(nn.Module):
    def __init__(self, config: CogVLMVisionConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.dense = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.query_key_value(x), "n l (three h d) -> three n h l d", three=3, h=self.num_heads)
        return self.dense(rearrange(scaled_dot_product_attention(q, k, v), "n h l d -> n l (h d)"))


class _Layer(nn.Module):
    """x + norm(attention(x)), then x + norm(mlp(x)): the norms' names are the checkpoint's, not their places."""

    def __init__(self, config: CogVLMVisionConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.width, config.norm_eps)
        self.attention = _Attention(config)
        self.mlp = GeluMLP(config.width, config.mlp_width)
        self.post_attention_layernorm = nn.LayerNorm(config.width, config.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.input_layernorm(self.attention(x))
        return x + self.post_attention_layernorm(self.mlp(x))


class _Transformer(nn.Module):
    def __init__(self, config: CogVLMVisionConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class _Adapter(nn.Module):
    """Projects to the decoder's width, and a gated MLP. Its norm has torch's epsilon, not the tower's."""

    def __init__(self, config: CogVLMVisionConfig) -> None:
        super().__init__()
        self.linear_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.norm1 = nn.LayerNorm(config.hidden, eps=1e-5)
        self.dense_h_to_4h = nn.Linear(config.hidden, config.adapter_width, bias=False)
        self.gate_proj = nn.Linear(config.hidden, config.adapter_width, bias=False)
        self.dense_4h_to_h = nn.Linear(config.adapter_width, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = gelu(self.norm1(self.linear_proj(x)))
        return self.dense_4h_to_h(silu(self.gate_proj(x)) * self.dense_h_to_4h(x))


class _Tower(nn.Module):
    """What lies below `vision.` in the checkpoint."""

    def __init__(self, config: CogVLMVisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embedding = _PatchEmbedding(config)
        self.transformer = _Transformer(config)
        self.linear_proj = _Adapter(config)
        if config.merges:
            self.conv = nn.Conv2d(config.width, config.width, _MERGE, _MERGE)
        if config.second_positions:
            self.pos_embed = nn.Parameter(torch.zeros(config.side**2, config.width))
        self.boi = nn.Parameter(torch.zeros(1, 1, config.hidden))
        self.eoi = nn.Parameter(torch.zeros(1, 1, config.hidden))

    def forward(self, patches_PF: Tensor) -> Tensor:
        x = self.transformer(self.patch_embedding(patches_PF))[:, 1:]
        if self.config.second_positions:
            x = x + self.pos_embed
        if self.config.merges:
            squares = rearrange(x, "n (h a w b) v -> n (h w) (v a b)", a=_MERGE, b=_MERGE, h=self.config.side // _MERGE)
            x = linear(squares, self.conv.weight.flatten(1), self.conv.bias)
        boi, eoi = (end.expand(x.shape[0], -1, -1) for end in (self.boi, self.eoi))
        return torch.cat((boi, self.linear_proj(x), eoi), dim=1).flatten(0, 1)


class CogVLMVision(nn.Module):
    """Tower, adapter, boi and eoi. Parameters have the checkpoint's names behind `CHECKPOINT_PREFIX`."""

    def __init__(self, config: CogVLMVisionConfig) -> None:
        super().__init__()
        self.config = config
        self.vision = _Tower(config)

    def forward(self, patches_PF: Tensor, grids: Grids) -> Tensor:
        """Returns the rows that replace token embeddings.

        Args:
            patches_PF: [P, F], each patch's pixels in the order (channel, row, column).
            grids: rows and columns of each tile; all have the config's.

        Returns:
            [N * rows_per_tile, hidden].
        """
        check_grids(grids, self.config.side)
        return self.vision(patches_PF)
