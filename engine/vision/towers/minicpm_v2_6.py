"""MiniCPM-V 2.6 and MiniCPM-Llama3-V 2.5: SigLIP for tiles of any shape, and a resampler without query positions.

The encoder is transformers' (Idefics2), whose names and numbers both checkpoints have; only the embeddings are ours,
because patches come flattened and positions are found as the originals find them.

**Padding in 2.5.** The original pads the tiles of a batch to the longest, and writes its mask of patches on the wrong
axis. So every position of the batch counts as a patch: padding takes part in attention, and patch k of a tile has the
position of row 0 and of the column at k / (length of the longest tile). What is trained here is used there, so the same
is computed here. The batch is the conversation, as in the original's `chat` and in its training with one sample a
device; the loader gives each grid the length of the longest tile as a third number (`engine.vision.minicpm_versions`).
So features do not depend on which conversations share a micro-batch, or on which rank encodes what. Without that number
a tile is alone in its batch, which is also what the original computes with `batch_vision_input` false.

Legend: N tiles, L patches of a tile, F = 3 * patch ** 2, V width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from engine.errors import UserError
from engine.layers.host_copies import sent
from engine.vision.minicpm_versions import TOWERS, minicpm_v_version
from engine.vision.towers.resampled_tower import ResampledTower, ResampledTowerConfig
from engine.vision.towers.resampler import Positions, ResamplerConfig
from engine.vision.towers.sizes import ENCODER_SIZES, Grid, Grids, counts_from_hf, heads_fit, square_side
from engine.vision.towers.tiles import encoder_flops, positions_of

CHECKPOINT_PREFIX = ""
"""What precedes the parameters' names in a checkpoint."""

_ACTIVATION = "gelu_pytorch_tanh"
_NORM_EPS = 1e-6
_DEFAULTS = {"hidden_act": _ACTIVATION, "layer_norm_eps": _NORM_EPS, "attention_dropout": 0.0, "num_channels": 3}


class PatchPlaces(Enum):
    """Where in the stored table a patch finds its position."""

    GRID = "at its row and column, as shares of the tile's"
    FLAT = "in the first row, at its share of the tile's patches"


_PLACES = {"2.5": PatchPlaces.FLAT, "2.6": PatchPlaces.GRID}


def _attended(grid: Grid) -> int:
    """Returns the positions that attention sees of a tile: its patches, and padding where the grid says so."""
    return grid[2] if len(grid) > 2 else grid[0] * grid[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class MiniCPMV26VisionConfig(ResampledTowerConfig):
    """Sizes of tower and resampler; `side` is that of a square slice.

    Args:
        width, mlp_width, num_heads: of a layer.
        num_layers: that are computed, without the one that the original may drop.
        patch: pixels on a side of a patch.
        table_side: positions on a side of the stored table.
        places: where patches find their positions.
    """

    width: int
    mlp_width: int
    num_heads: int
    num_layers: int
    patch: int
    table_side: int
    places: PatchPlaces

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> MiniCPMV26VisionConfig:
        """Reads the `config.json` of either model.

        Raises:
            UserError: it is another version or tower, or a size is missing or does not fit.
        """
        version = minicpm_v_version(hf)
        vision = hf.get("vision_config")
        sizes = counts_from_hf(vision, ENCODER_SIZES, "vision_config")
        assert isinstance(vision, Mapping)
        if (kind := vision.get("model_type")) not in TOWERS and (kind is not None or hf.get("version") is None):
            raise UserError(
                f"config.json has a vision tower of type {kind!r}, but MiniCPM-V has siglip or idefics2: correct "
                "vision_config.model_type or copy it again."
            )
        for key, value in _DEFAULTS.items():
            if vision.get(key, value) != value:
                raise UserError(
                    f"config.json has vision_config.{key} {vision[key]!r}, but this model's tower has {value!r}: use a "
                    "model with that."
                )
        width = sizes["hidden_size"]
        heads_fit(width, sizes["num_attention_heads"])
        return cls(
            width=width,
            mlp_width=sizes["intermediate_size"],
            num_heads=sizes["num_attention_heads"],
            num_layers=sizes["num_hidden_layers"] - (1 if hf.get("drop_vision_last_layer", True) else 0),
            patch=sizes["patch_size"],
            table_side=square_side(sizes["image_size"], sizes["patch_size"], "vision_config"),
            places=_PLACES[version],
            side=_slice_side(hf, sizes["patch_size"]),
            resampler=ResamplerConfig.from_hf(hf, "query_num", tower_width=width, positions=Positions.KEYS),
        )

    def build(self) -> MiniCPMV26Vision:
        """Returns the module."""
        return MiniCPMV26Vision(self)

    @property
    def patch_features(self) -> int:
        """Numbers of a patch."""
        return 3 * self.patch**2

    def flops(self, grids: Grids) -> int:
        """Returns the FLOPs of these tiles in forward."""
        lengths = list(map(_attended, grids))
        embedding = 2 * sum(lengths) * 3 * self.patch**2 * self.width
        encoder = encoder_flops(lengths, width=self.width, mlp_width=self.mlp_width, depth=self.num_layers)
        return embedding + encoder + self.resampler.flops(grids)


def _slice_side(hf: Mapping[str, Any], patch: int) -> int:
    slices = hf.get("slice_config")
    slices = slices if isinstance(slices, Mapping) else {}
    sizes = counts_from_hf({"scale_resolution": 448, **slices}, ("scale_resolution",), "slice_config")
    return square_side(sizes["scale_resolution"], patch, "slice_config.scale_resolution")


def position_buckets(count: int, side: int) -> Tensor:
    """Returns which of `side` places on an axis each of `count` patches has: int64 [count], on the host.

    Shares and bounds are rounded as in the originals, which decides between neighbours where a share falls on a bound:
    the step is rounded to fp32 before `arange`.
    """
    step = float(np.float32(1) / np.float32(count))
    shares = torch.arange(0, 1 - 1e-6, step, dtype=torch.float32, device="cpu")
    bounds = torch.arange(1 / side, 1.0, 1 / side, dtype=torch.float32, device="cpu")
    return torch.bucketize(shares, bounds, right=True)


class _Embeddings(nn.Module):
    def __init__(self, config: MiniCPMV26VisionConfig) -> None:
        super().__init__()
        self.side = config.table_side
        self.places = config.places
        self.patch_embedding = nn.Conv2d(3, config.width, config.patch, config.patch)
        self.position_embedding = nn.Embedding(config.table_side**2, config.width)

    def forward(self, patches_NLF: Tensor, grids: Grids) -> Tensor:
        x = linear(patches_NLF, self.patch_embedding.weight.flatten(1), self.patch_embedding.bias)
        return x + positions_of(grids, lambda grid: self.position_embedding(self._places(grid, x.device)))

    def _places(self, grid: Grid, device: torch.device) -> Tensor:
        rows, columns, *_ = grid
        if self.places is PatchPlaces.FLAT:
            return sent(position_buckets(_attended(grid), self.side), device)
        down = sent(position_buckets(rows, self.side), device)
        across = sent(position_buckets(columns, self.side), device)
        return (down[:, None] * self.side + across).flatten()


class _Tower(nn.Module):
    """SigLIP, from patches to normalised features."""

    def __init__(self, config: MiniCPMV26VisionConfig) -> None:
        super().__init__()
        from transformers.models.idefics2.configuration_idefics2 import Idefics2VisionConfig
        from transformers.models.idefics2.modeling_idefics2 import Idefics2Encoder

        encoder = Idefics2VisionConfig(
            hidden_size=config.width,
            intermediate_size=config.mlp_width,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            hidden_act=_ACTIVATION,
            layer_norm_eps=_NORM_EPS,
            attn_implementation="sdpa",
        )
        self.embeddings = _Embeddings(config)
        self.encoder = Idefics2Encoder(encoder)
        self.post_layernorm = nn.LayerNorm(config.width, eps=_NORM_EPS)

    def forward(self, patches_NLF: Tensor, grids: Grids) -> Tensor:
        """Returns [N, L, V].

        Args:
            patches_NLF: tiles with equally many patches, each flattened as (channel, y, x).
            grids: of these tiles; with equally much padding.
        """
        length = patches_NLF.shape[1]
        x = self.embeddings(pad(patches_NLF, (0, 0, 0, _attended(grids[0]) - length)), grids)
        return self.post_layernorm(self.encoder(inputs_embeds=x, attention_mask=None).last_hidden_state[:, :length])


class MiniCPMV26Vision(ResampledTower):
    """The vision model. The original of 2.6 pads tiles and masks the padding."""

    def __init__(self, config: MiniCPMV26VisionConfig) -> None:
        super().__init__(config, _Tower(config))
