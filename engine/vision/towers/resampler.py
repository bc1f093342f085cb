"""The resampler of MiniCPM-V and OmniLMM: one cross attention of learned queries over a tile's patches.

    keys = LN(kv_proj(x)) + positions,  values = LN(kv_proj(x)),  queries = LN(query) [+ stored positions]
    features = LN(attention(queries, keys, values)) @ proj

`proj` multiplies from the right: it is no linear's weight. All names are the checkpoints'. Weights come from a
checkpoint; nothing is initialised here but to zero.

Legend: N tiles, L patches of a tile, V tower's width, Q queries, D decoder's width, h heads, d = D / h.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import isqrt
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.nn.functional import interpolate, linear, scaled_dot_product_attention

from engine.errors import UserError
from engine.vision.towers.sizes import Grid, Grids, counts_from_hf
from engine.vision.towers.tiles import positions_of, run_kind

NORM_EPS = 1e-6
_HEAD_DIM = 128
_WAVELENGTH = 10000.0


class Positions(Enum):
    """What tells patches and queries where they are."""

    KEYS = "sines of the patch's place on the keys"
    KEYS_AND_QUERIES = "the same, and a stored table on the queries"
    QUERY_TABLE = "a stored table on the queries, resized for the keys"


@dataclass(frozen=True, kw_only=True, slots=True)
class ResamplerConfig:
    """Sizes of a resampler.

    Args:
        num_queries: feature rows of a tile.
        width: of the decoder.
        tower_width: of the patches' features.
        positions: the family's kind.
    """

    num_queries: int
    width: int
    tower_width: int
    positions: Positions

    @classmethod
    def from_hf(
        cls, hf: Mapping[str, Any], queries_key: str, *, tower_width: int, positions: Positions
    ) -> ResamplerConfig:
        """Reads `hidden_size` and the number of queries from a `config.json`.

        Raises:
            UserError: one of them is missing or does not fit the resampler.
        """
        sizes = counts_from_hf(hf, ("hidden_size", queries_key))
        width, queries = sizes["hidden_size"], sizes[queries_key]
        heads = width // _HEAD_DIM
        if heads == 0 or width % heads or width % 4:
            raise UserError(
                f"config.json has hidden_size {width}, which the resampler cannot divide into heads of {_HEAD_DIM} and "
                "four parts of a position: correct it or copy it again."
            )
        if positions is not Positions.KEYS and isqrt(queries) ** 2 != queries:
            raise UserError(
                f"config.json has {queries_key} {queries}, but this model's queries form a square: correct it or copy "
                "it again."
            )
        return cls(num_queries=queries, width=width, tower_width=tower_width, positions=positions)

    @property
    def num_heads(self) -> int:
        return self.width // _HEAD_DIM

    def flops(self, grids: Grids) -> int:
        """Returns the FLOPs of these tiles in forward; norms are left out."""
        kinds = [run_kind(grid) for grid in grids]
        inputs = self.tower_width if self.tower_width != self.width else 0
        per_patch = 2 * self.width * (inputs + 2 * self.width) + 4 * self.num_queries * self.width
        product = 2 * self.num_queries * self.width**2
        # queries are projected once for all tiles of a batch; out_proj and proj have rows of every tile
        return sum(kind[0] for kind in kinds) * per_patch + (2 * len(kinds) + len(set(kinds))) * product


class _CrossAttention(nn.Module):
    """Multi-head attention with the parameters of torch's own, which projects the queries once for all tiles."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.in_proj_weight = nn.Parameter(torch.zeros(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, queries_QD: Tensor, keys_NLD: Tensor, values_NLD: Tensor) -> Tensor:
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        heads = self.num_heads
        q = repeat(linear(queries_QD, weights[0], biases[0]), "q (h d) -> n h q d", n=keys_NLD.shape[0], h=heads)
        k = rearrange(linear(keys_NLD, weights[1], biases[1]), "n l (h d) -> n h l d", h=heads)
        v = rearrange(linear(values_NLD, weights[2], biases[2]), "n l (h d) -> n h l d", h=heads)
        return self.out_proj(rearrange(scaled_dot_product_attention(q, k, v), "n h q d -> n q (h d)"))


class Resampler(nn.Module):
    """Turns a tile's patches into `num_queries` rows of the decoder's width.

    `pos_embed` is a parameter where the checkpoint stores it. The originals keep it out of training, unless an
    adapter's `modules_to_save` makes the whole resampler trainable.
    """

    def __init__(self, config: ResamplerConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.query = nn.Parameter(torch.zeros(config.num_queries, width))
        if config.positions is not Positions.KEYS:
            self.pos_embed = nn.Parameter(torch.zeros(config.num_queries, width))
        self.kv_proj = (
            nn.Linear(config.tower_width, width, bias=False) if config.tower_width != width else nn.Identity()
        )
        self.attn = _CrossAttention(width, config.num_heads)
        self.ln_q = nn.LayerNorm(width, eps=NORM_EPS)
        self.ln_kv = nn.LayerNorm(width, eps=NORM_EPS)
        self.ln_post = nn.LayerNorm(width, eps=NORM_EPS)
        self.proj = nn.Parameter(torch.zeros(width, width))

    def forward(self, x_NLV: Tensor, grids: Grids) -> Tensor:
        """Returns [N, Q, D].

        Args:
            x_NLV: the tower's features of tiles with equally many patches.
            grids: of these tiles.
        """
        values = self.ln_kv(self.kv_proj(x_NLV))
        keys = values + self._key_positions(grids, values)
        queries = self.ln_q(self.query)
        if self.config.positions is not Positions.KEYS:
            queries = queries + self.pos_embed
        return self.ln_post(self.attn(queries, keys, values)) @ self.proj

    def _key_positions(self, grids: Grids, values: Tensor) -> Tensor:
        if self.config.positions is Positions.QUERY_TABLE:
            return positions_of(grids, lambda grid: resize_table(self.pos_embed, grid))
        side = max(map(max, grids))
        sines = sincos(side, self.config.width // 2, values.device).to(values.dtype)
        return positions_of(grids, lambda grid: place_rows(sines, grid))


def sincos(count: int, width: int, device: torch.device) -> Tensor:
    """Returns [sin | cos] of the numbers below `count` at `width` / 2 wavelengths, in fp32: [count, width]."""
    half = width // 2
    # made on the device, because tables for large tiles are too long to be copied without waiting
    rates = 1.0 / _WAVELENGTH ** (torch.arange(half, dtype=torch.float32, device=device) / half)
    angles = torch.arange(count, dtype=torch.float32, device=device).outer(rates)
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def place_rows(sines: Tensor, grid: Grid) -> Tensor:
    """Returns the position of each patch of a tile: its column in the first half of the channels, then its row."""
    rows, columns = grid
    across = repeat(sines[:columns], "w c -> (h w) c", h=rows)
    down = repeat(sines[:rows], "h c -> (h w) c", w=columns)
    return torch.cat((across, down), dim=1)


def resize_table(table_LD: Tensor, grid: Grid, *, antialias: bool = False) -> Tensor:
    """Returns a square table of positions for another grid, by bicubic interpolation in fp32: [rows * columns, D].

    The table is taken as it is where it has the grid's size. The gradient of a trained table adds up in no fixed order
    on a GPU, as torch's does.
    """
    side = isqrt(table_LD.shape[0])
    if grid == (side, side):
        return table_LD
    image = rearrange(table_LD.float(), "(h w) d -> 1 d h w", h=side)
    resized = interpolate(image, size=grid, mode="bicubic", align_corners=False, antialias=antialias)
    return rearrange(resized, "1 d h w -> (h w) d").to(table_LD.dtype)
