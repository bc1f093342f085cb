"""CLIP's tower for pictures of one size, up to the last layer whose output is taken.

The layers are transformers'; the embeddings are ours, because patches come flattened.

Legend: N pictures, L patches of each, F = 3 * patch ** 2, V width, S outputs that are taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from engine.models.vision.sizes import (
    ENCODER_SIZES,
    Grids,
    activation_from_hf,
    check_dropout,
    counts_from_hf,
    heads_fit,
    number_from_hf,
    whole_patches,
)
from engine.models.vision.tiles import encoder_flops

_DEFAULTS = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "patch_size": 32, "image_size": 224, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
}  # fmt: skip
"""What `vision_config` leaves out where it is what transformers' class has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipConfig:
    """Sizes of the tower.

    Args:
        width, mlp_width, num_heads: of a layer.
        num_layers: that are computed.
        stored_layers: that the checkpoint has.
        patch: pixels on a side of a patch.
        side: patches on a side of a picture.
        activation: of the MLP, as transformers names it.
        norm_eps: of all norms.
    """

    width: int
    mlp_width: int
    num_heads: int
    num_layers: int
    stored_layers: int
    patch: int
    side: int
    activation: str
    norm_eps: float

    has_class = True
    """The first output of a layer is that of a token for the class of the picture."""

    @classmethod
    def from_hf(cls, vision: Mapping[str, Any], states: tuple[int, ...]) -> ClipConfig:
        """Reads `vision_config`.

        Args:
            states: the layers' outputs that are taken, see `taken_states`.

        Raises:
            UserError: a size does not fit.
        """
        vision = {**_DEFAULTS, **vision}
        sizes = counts_from_hf(vision, ENCODER_SIZES, "vision_config")
        heads_fit(sizes["hidden_size"], sizes["num_attention_heads"])
        check_dropout(vision)
        return cls(
            width=sizes["hidden_size"],
            mlp_width=sizes["intermediate_size"],
            num_heads=sizes["num_attention_heads"],
            num_layers=max(states),
            stored_layers=sizes["num_hidden_layers"],
            patch=sizes["patch_size"],
            side=whole_patches(sizes["image_size"], sizes["patch_size"], "vision_config"),
            activation=activation_from_hf(vision, "hidden_act", "vision_config"),
            norm_eps=number_from_hf(vision, "layer_norm_eps", "vision_config"),
        )

    def build(self) -> ClipTower:
        """Returns the module."""
        return ClipTower(self)

    def flops(self, grids: Grids) -> int:
        """Returns the FLOPs of these pictures in forward."""
        lengths = [rows * columns for rows, columns in grids]
        embedding = 2 * sum(lengths) * 3 * self.patch**2 * self.width
        lengths = [length + 1 for length in lengths]
        return embedding + encoder_flops(lengths, width=self.width, mlp_width=self.mlp_width, depth=self.num_layers)


class _Embeddings(nn.Module):
    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        self.class_embedding = nn.Parameter(torch.empty(config.width))
        self.patch_embedding = nn.Conv2d(3, config.width, config.patch, config.patch, bias=False)
        self.position_embedding = nn.Embedding(config.side**2 + 1, config.width)

    def forward(self, patches_NLF: Tensor) -> Tensor:
        patches = linear(patches_NLF, self.patch_embedding.weight.flatten(1))
        first = self.class_embedding.expand(patches.shape[0], 1, -1)
        return torch.cat([first, patches], dim=1) + self.position_embedding.weight


class ClipTower(nn.Module):
    """The tower."""

    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        from transformers.models.clip.configuration_clip import CLIPVisionConfig
        from transformers.models.clip.modeling_clip import CLIPEncoder

        encoder = CLIPVisionConfig(
            hidden_size=config.width,
            intermediate_size=config.mlp_width,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            hidden_act=config.activation,
            layer_norm_eps=config.norm_eps,
            attn_implementation="sdpa",
        )
        self.embeddings = _Embeddings(config)
        self.pre_layrnorm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.encoder = CLIPEncoder(encoder)

    def forward(self, patches_NLF: Tensor, states: tuple[int, ...]) -> Tensor:
        """Returns [N, 1 + L, S * V]: what enters the first layer (state 0) or leaves layer i - 1 (state i)."""
        x = self.pre_layrnorm(self.embeddings(patches_NLF))
        return outputs_of(self.encoder.layers, x, states, None)


def outputs_of(layers: nn.ModuleList, x_NLV: Tensor, states: tuple[int, ...], *arguments: Any) -> Tensor:
    """Runs transformers' encoder layers; returns [N, L, S * V], the outputs that are taken side by side.

    Args:
        states: 0 for x itself, i for what leaves layer i - 1.
        arguments: of a layer, behind x.
    """
    taken = {0: x_NLV}
    for number, layer in enumerate(layers, start=1):
        x_NLV = layer(x_NLV, *arguments)
        if number in states:
            taken[number] = x_NLV
    return torch.cat([taken[state] for state in states], dim=-1)
