"""The towers that MiniCPM-V 2.0 and OmniLMM take from timm, by its names: SigLIP so400m, and EVA02-E CLIP "plus".

Both have fused query, key and value, an MLP with the exact GELU, and one table of positions, resized for each tile.
They differ in the places of the norms, EVA's class token, and its biases. timm is not needed. What the originals remove
is absent here: the attention pool, the head, and the last block.

Legend: N tiles, L patches of a tile, F = 3 * patch ** 2, V width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from engine.errors import UserError
from engine.vision.towers.parts import GeluMLP, PatchEmbedding
from engine.vision.towers.resampler import resize_table
from engine.vision.towers.sizes import Grids, counts_from_hf, sizes_in_code
from engine.vision.towers.tiles import encoder_flops, positions_of

_NORM_EPS = 1e-6
_SIZES = ("embed_dim", "depth_in_timm", "num_heads", "mlp_hidden", "patch_size")


class TimmKind(Enum):
    """Which of timm's towers it is.

    | | SIGLIP | EVA_PLUS |
    |---|---|---|
    | block | x + f(norm(x)) | x + norm(f(x)) |
    | class token | none | first, dropped at the end |
    | bias of q, k, v | one, in `qkv` | `q_bias` and `v_bias`; none for k |
    """

    SIGLIP = "VisionTransformer"
    EVA_PLUS = "Eva"


@dataclass(frozen=True, kw_only=True, slots=True)
class TimmViTConfig:
    """Sizes of a tower.

    Args:
        kind: see there.
        width, num_heads, mlp_width: of a block.
        depth: blocks that are computed, without those that the original drops.
        patch: pixels on a side of a patch.
        table_side: positions on a side of the stored table.
    """

    kind: TimmKind
    width: int
    num_heads: int
    mlp_width: int
    depth: int
    patch: int
    table_side: int

    @property
    def extra_positions(self) -> int:
        """Positions in front of the patches."""
        return 1 if self.kind is TimmKind.EVA_PLUS else 0

    def flops(self, grids: Grids) -> int:
        """Returns the FLOPs of these tiles in forward; norms and resized tables are left out."""
        lengths = [rows * columns for rows, columns in grids]
        embedding = 2 * sum(lengths) * 3 * self.patch**2 * self.width
        positions = [length + self.extra_positions for length in lengths]
        return embedding + encoder_flops(positions, width=self.width, mlp_width=self.mlp_width, depth=self.depth)


SIGLIP_SO400M_384 = TimmViTConfig(
    kind=TimmKind.SIGLIP, width=1152, num_heads=16, mlp_width=4304, depth=27, patch=14, table_side=27
)
EVA02_ENORMOUS_PLUS_224 = TimmViTConfig(
    kind=TimmKind.EVA_PLUS, width=1792, num_heads=16, mlp_width=15360, depth=64, patch=14, table_side=16
)


def tower_sizes(hf: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """Returns the mapping of `config.json` with a tower's sizes, and its name; None where the code has them."""
    return sizes_in_code(hf, "depth_in_timm")


def timm_vit_from_hf(hf: Mapping[str, Any], released: TimmViTConfig, *, dropped: int) -> TimmViTConfig:
    """Returns the tower of a model whose `config.json` names no sizes, because its code or timm's name for it has them.

    A checkpoint of another size than the released one gives them in `tower_config`, see `sizes_in_code`.

    Args:
        released: the sizes of the released checkpoint, with all of timm's blocks.
        dropped: blocks at the end that the model does not compute.

    Raises:
        UserError: what is in `tower_config` is no tower of this kind.
    """
    if (given := tower_sizes(hf)) is None:
        return replace(released, depth=released.depth - dropped)
    place, part = given
    sizes = counts_from_hf(part, _SIZES, place)
    expected = {
        "act": "gelu_erf",
        "layer_norm_eps": _NORM_EPS,
        "class_token": released.extra_positions > 0,
        "use_post_norm": released.kind is TimmKind.EVA_PLUS,
        "blocks_kept": sizes["depth_in_timm"] - dropped,
    }
    for key, value in expected.items():
        if part.get(key, value) != value:
            raise UserError(
                f"config.json has {place}.{key} {part[key]!r}, but this model's tower has {value!r}: correct it."
            )
    grid = part.get("pos_grid")
    if not isinstance(grid, list) or len(grid) != 2 or grid[0] != grid[1]:
        raise UserError(f"config.json has {place}.pos_grid {grid!r}, but two equal numbers are expected: correct it.")
    if sizes["embed_dim"] % sizes["num_heads"]:
        raise UserError(
            f"config.json has {place}.embed_dim {sizes['embed_dim']}, which does not divide into "
            f"{sizes['num_heads']} heads: correct it."
        )
    return TimmViTConfig(
        kind=released.kind,
        width=sizes["embed_dim"],
        num_heads=sizes["num_heads"],
        mlp_width=sizes["mlp_hidden"],
        depth=sizes["depth_in_timm"] - dropped,
        patch=sizes["patch_size"],
        table_side=grid[0],
    )


class _Attention(nn.Module):
    def __init__(self, config: TimmViTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.key_has_no_bias = config.kind is TimmKind.EVA_PLUS
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=not self.key_has_no_bias)
        if self.key_has_no_bias:
            self.q_bias = nn.Parameter(torch.zeros(config.width))
            self.v_bias = nn.Parameter(torch.zeros(config.width))
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        if self.key_has_no_bias:
            qkv = qkv + torch.cat((self.q_bias, torch.zeros_like(self.q_bias), self.v_bias))
        q, k, v = rearrange(qkv, "n l (three h d) -> three n h l d", three=3, h=self.num_heads)
        return self.proj(rearrange(scaled_dot_product_attention(q, k, v), "n h l d -> n l (h d)"))


class _Block(nn.Module):
    def __init__(self, config: TimmViTConfig) -> None:
        super().__init__()
        self.norms_outputs = config.kind is TimmKind.EVA_PLUS
        self.norm1 = nn.LayerNorm(config.width, eps=_NORM_EPS)
        self.attn = _Attention(config)
        self.norm2 = nn.LayerNorm(config.width, eps=_NORM_EPS)
        self.mlp = GeluMLP(config.width, config.mlp_width)

    def forward(self, x: Tensor) -> Tensor:
        if self.norms_outputs:
            x = x + self.norm1(self.attn(x))
            return x + self.norm2(self.mlp(x))
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TimmViT(nn.Module):
    """A tower, from patches to normalised features, without its class token."""

    def __init__(self, config: TimmViTConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbedding(config.width, config.patch)
        if config.extra_positions:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, config.width))
        positions = config.table_side**2 + config.extra_positions
        self.pos_embed = nn.Parameter(torch.zeros(1, positions, config.width))
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width, eps=_NORM_EPS)

    def forward(self, patches_NLF: Tensor, grids: Grids) -> Tensor:
        """Returns [N, L, V].

        Args:
            patches_NLF: tiles with equally many patches, each flattened as (channel, y, x).
            grids: of these tiles.
        """
        x = self.patch_embed(patches_NLF)
        extra = self.config.extra_positions
        front, table = self.pos_embed[0, :extra], self.pos_embed[0, extra:]
        x = x + positions_of(grids, lambda grid: resize_table(table, grid, antialias=True))
        if extra:
            x = torch.cat(((self.cls_token + front).expand(len(grids), -1, -1), x), dim=1)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)[:, extra:]
