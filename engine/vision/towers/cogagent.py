"""CogAgent's encoder of large images, which every decoder layer attends to: EVA02-CLIP-L without its last block.

Positions are learned, and patches are rotated besides: the first half of a head by the row, the second by the column,
adjacent features together. The class token is not rotated, and dropped at the end. The checkpoint's head, last norm and
last block are not computed with.

Legend: N tiles, P patches of all tiles, L positions of a tile (cls first), F = 3 * patch ** 2, V width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from engine.vision.towers.cogvlm import CHECKPOINT_PREFIX
from engine.vision.towers.parts import PatchEmbedding
from engine.vision.towers.sizes import Grid, Grids, SquareTiles, check_grids, counts_from_hf, sizes_in_code, square_side

_RELEASED = {
    "layers_run": 23,
    "num_heads": 16,
    "mlp_hidden": 2730,
    "patch_size": 14,
    "pt_hw_seq_len": 16,
}
"""Sizes that the released model has in its code, not in config.json; see `sizes_in_code`."""
_THETA = 10000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossVisionConfig(SquareTiles):
    """Sizes of the encoder.

    Args:
        width, num_layers, num_heads, mlp_width: of what is computed; the checkpoint has one more block.
        trained_side: patches on a side of the images of pretraining, which rotary coordinates are scaled to.
        norm_eps: of all norms.
    """

    width: int
    num_layers: int
    num_heads: int
    mlp_width: int
    trained_side: int
    norm_eps: float = 1e-6

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> CrossVisionConfig:
        """Reads CogAgent's `config.json`.

        Raises:
            UserError: a size is missing or does not fit the others.
        """
        top = counts_from_hf(hf, ("cross_hidden_size", "cross_image_size"))
        place, given = sizes_in_code(hf, "pt_hw_seq_len") or ("cross_vision_config", _RELEASED)
        sizes = counts_from_hf(given, tuple(_RELEASED), place)
        return cls(
            width=top["cross_hidden_size"],
            num_layers=sizes["layers_run"],
            num_heads=sizes["num_heads"],
            mlp_width=sizes["mlp_hidden"],
            patch=sizes["patch_size"],
            side=square_side(top["cross_image_size"], sizes["patch_size"], "cross_image_size"),
            trained_side=sizes["pt_hw_seq_len"],
        )

    @property
    def not_computed(self) -> tuple[str, ...]:
        """Patterns of the checkpoint's tensors that no parameter holds: carried through conversions as they are."""
        vit = f"{CHECKPOINT_PREFIX}cross_vision.vit.model"
        skipped = f"{vit}.blocks.{self.num_layers}.*"
        return (skipped, f"{vit}.norm.*", f"{vit}.head.*", f"{vit}.rope.freqs_*", f"{vit}.blocks.*.attn.rope.freqs_*")

    def build(self) -> CogAgentCrossVision:
        """Returns the module."""
        return CogAgentCrossVision(self)

    def flops(self, grids: Grids) -> int:
        """Returns the operations of a forward pass, two for each multiplication and addition."""
        width, patches = self.width, self.side**2
        positions = patches + 1
        block = positions * width * (4 * width + 3 * self.mlp_width) + 2 * positions**2 * width
        embedding = patches * 3 * self.patch**2 * width
        return 2 * len(grids) * (embedding + self.num_layers * block)

    @property
    def rows_per_tile(self) -> int:
        """Encoded rows of one image."""
        return self.side**2

    def num_features(self, grid: Grid) -> int:
        """Returns the feature rows of a tile."""
        return self.rows_per_tile


def rotary_tables(config: CrossVisionConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns cos and sin, fp32 [side ** 2, head width], of the patches in row-major order."""
    half = config.width // config.num_heads // 2
    frequencies = 1 / _THETA ** (torch.arange(0, half, 2, device=device).float() / half)
    place = torch.arange(config.side, device=device).float() / config.side * config.trained_side
    angles = repeat(torch.outer(place, frequencies), "s f -> s (f 2)")
    rows = repeat(angles, "h d -> (h w) d", w=config.side)
    columns = repeat(angles, "w d -> (h w) d", h=config.side)
    both = torch.cat((rows, columns), dim=1)
    return both.cos(), both.sin()


def _rotated(x_NHLD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the patches of queries or keys; the class token in front stays."""
    cls, patches = x_NHLD[:, :, :1], x_NHLD[:, :, 1:]
    first, second = rearrange(patches, "... (d two) -> two ... d", two=2)
    turned = rearrange([-second, first], "two ... d -> ... (d two)")
    return torch.cat((cls, (patches * cos + turned * sin).to(x_NHLD.dtype)), dim=2)


class _Attention(nn.Module):
    def __init__(self, config: CrossVisionConfig) -> None:
        super().__init__()
        width, self.num_heads = config.width, config.num_heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.q_bias = nn.Parameter(torch.zeros(width))
        self.v_bias = nn.Parameter(torch.zeros(width))
        self.inner_attn_ln = nn.LayerNorm(width, config.norm_eps)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.q_proj(x) + self.q_bias, self.k_proj(x), self.v_proj(x) + self.v_bias
        q, k, v = (rearrange(one, "n l (h d) -> n h l d", h=self.num_heads) for one in (q, k, v))
        mixed = scaled_dot_product_attention(_rotated(q, cos, sin), _rotated(k, cos, sin), v)
        return self.proj(self.inner_attn_ln(rearrange(mixed, "n h l d -> n l (h d)")))


class _MLP(nn.Module):
    """w3(norm(silu(w1 x) * w2 x))."""

    def __init__(self, config: CrossVisionConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.width, config.mlp_width)
        self.w2 = nn.Linear(config.width, config.mlp_width)
        self.ffn_ln = nn.LayerNorm(config.mlp_width, config.norm_eps)
        self.w3 = nn.Linear(config.mlp_width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.w3(self.ffn_ln(silu(self.w1(x)) * self.w2(x)))


class _Block(nn.Module):
    def __init__(self, config: CrossVisionConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, config.norm_eps)
        self.attn = _Attention(config)
        self.norm2 = nn.LayerNorm(config.width, config.norm_eps)
        self.mlp = _MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class _Model(nn.Module):
    def __init__(self, config: CrossVisionConfig) -> None:
        super().__init__()
        self.config = config
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.pos_embed = nn.Parameter(torch.zeros(1, config.side**2 + 1, config.width))
        self.patch_embed = PatchEmbedding(config.width, config.patch)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_layers))

    def forward(self, patches_PF: Tensor) -> Tensor:
        x = rearrange(self.patch_embed(patches_PF), "(n p) v -> n p v", p=self.config.side**2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed
        cos, sin = rotary_tables(self.config, x.device)
        for block in self.blocks:
            x = block(x, cos, sin)
        return x[:, 1:]


class _Vit(nn.Module):
    def __init__(self, config: CrossVisionConfig) -> None:
        super().__init__()
        self.model = _Model(config)


class _CrossVision(nn.Module):
    """What lies below `cross_vision.` in the checkpoint."""

    def __init__(self, config: CrossVisionConfig) -> None:
        super().__init__()
        self.vit = _Vit(config)
        self.pos_embed = nn.Parameter(torch.zeros(config.side**2, config.width))


class CogAgentCrossVision(nn.Module):
    """The encoder. Parameters have the checkpoint's names behind `CHECKPOINT_PREFIX`."""

    def __init__(self, config: CrossVisionConfig) -> None:
        super().__init__()
        self.config = config
        self.cross_vision = _CrossVision(config)

    def forward(self, patches_PF: Tensor, grids: Grids) -> Tensor:
        """Returns what decoder layers attend to.

        Args:
            patches_PF: [P, F], each patch's pixels in the order (channel, row, column).
            grids: rows and columns of each tile; all have the config's.

        Returns:
            [N * rows_per_tile, V].
        """
        check_grids(grids, self.config.side)
        encoded = self.cross_vision.vit.model(patches_PF) + self.cross_vision.pos_embed
        return encoded.flatten(0, 1)
