"""Encoders of transformers for tiles of one size: their sizes, and how their layers are run.

Each family has embeddings of its own, because patches come flattened; what is between them and the features is here.

Legend: N tiles, L positions of each, V width, S outputs that are taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from engine.vision.towers.sizes import (
    ENCODER_SIZES,
    Grids,
    SquareTiles,
    activation_from_hf,
    check_settings,
    counts_from_hf,
    heads_fit,
    number_from_hf,
    whole_patches,
)
from engine.vision.towers.tiles import encoder_flops


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderConfig(SquareTiles):
    """Sizes of an encoder.

    Args:
        width, mlp_width, num_heads: of a layer.
        num_layers: that are computed.
        stored_layers: that the checkpoint has.
        activation: of the MLP, as transformers names it.
        norm_eps: of all norms.
    """

    width: int
    mlp_width: int
    num_heads: int
    num_layers: int
    stored_layers: int
    activation: str
    norm_eps: float

    has_class: ClassVar[bool] = False
    """Whether the first output of a layer is that of a token for the class of the image."""

    def encoder_flops(self, grids: Grids) -> int:
        """Returns the FLOPs of the encoder for these tiles in forward."""
        lengths = [rows * columns for rows, columns in grids]
        embedding = 2 * sum(lengths) * self.patch_features * self.width
        lengths = [length + self.has_class for length in lengths]
        return embedding + encoder_flops(lengths, width=self.width, mlp_width=self.mlp_width, depth=self.num_layers)

    @property
    def stock(self) -> dict[str, Any]:
        """The arguments of transformers' configuration of its encoder."""
        return {
            "hidden_size": self.width,
            "intermediate_size": self.mlp_width,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "hidden_act": self.activation,
            "layer_norm_eps": self.norm_eps,
            "attn_implementation": "sdpa",
        }


def sizes_from_hf(vision: Mapping[str, Any], num_layers: int | None = None) -> dict[str, Any]:
    """Reads the arguments of `EncoderConfig` from `vision_config`.

    Args:
        vision: with what transformers' class has where it says nothing.
        num_layers: that are computed; None for all.

    Raises:
        UserError: a size does not fit, or the encoder differs from what is built here.
    """
    sizes = counts_from_hf(vision, ENCODER_SIZES, "vision_config")
    heads_fit(sizes["hidden_size"], sizes["num_attention_heads"])
    check_settings(vision)
    return {
        "width": sizes["hidden_size"],
        "mlp_width": sizes["intermediate_size"],
        "num_heads": sizes["num_attention_heads"],
        "num_layers": sizes["num_hidden_layers"] if num_layers is None else num_layers,
        "stored_layers": sizes["num_hidden_layers"],
        "patch": sizes["patch_size"],
        "side": whole_patches(sizes["image_size"], sizes["patch_size"], "vision_config"),
        "activation": activation_from_hf(vision, "hidden_act", "vision_config"),
        "norm_eps": number_from_hf(vision, "layer_norm_eps", "vision_config"),
    }


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
