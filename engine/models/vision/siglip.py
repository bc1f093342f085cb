"""SigLIP's tower for pictures of one size: all layers and the last norm, or up to the last layer whose output is taken.

The layers are transformers'; the embeddings are ours, because patches come flattened. The pooling head is left out, as
language models read patches.

Legend: N pictures, L patches of each, F = 3 * patch ** 2, V width, S outputs that are taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import linear

from engine.errors import UserError
from engine.models.vision.clip import outputs_of
from engine.models.vision.sizes import (
    ENCODER_SIZES,
    Grids,
    activation_from_hf,
    counts_from_hf,
    heads_fit,
    number_from_hf,
    whole_patches,
)
from engine.models.vision.tiles import encoder_flops

_DEFAULTS = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "patch_size": 16, "image_size": 224, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
}  # fmt: skip
"""What `vision_config` leaves out where it is what transformers' class has."""
_SETTINGS = {"attention_dropout": 0.0, "num_channels": 3}


@dataclass(frozen=True, kw_only=True, slots=True)
class SiglipConfig:
    """Sizes of the tower.

    Args:
        width, mlp_width, num_heads: of a layer.
        num_layers: that are computed.
        stored_layers: that the checkpoint has.
        patch: pixels on a side of a patch.
        side: patches on a side of a picture.
        activation: of the MLP, as transformers names it.
        norm_eps: of all norms.
        has_last_norm: the last norm is computed.
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
    has_last_norm: bool

    has_class = False
    """All outputs of a layer are those of patches."""

    @classmethod
    def from_hf(cls, vision: Mapping[str, Any], states: tuple[int, ...] | None = None) -> SiglipConfig:
        """Reads `vision_config`.

        Args:
            states: the layers' outputs that are taken, 0 for what enters the first; None for what the last norm makes
                of all layers.

        Raises:
            UserError: a size does not fit.
        """
        vision = {**_DEFAULTS, **vision}
        sizes = counts_from_hf(vision, ENCODER_SIZES, "vision_config")
        for key, value in _SETTINGS.items():
            if vision.get(key, value) != value:
                raise UserError(
                    f"config.json has vision_config.{key} {vision[key]!r}, but {value!r} is expected: use a model with "
                    "that."
                )
        heads_fit(sizes["hidden_size"], sizes["num_attention_heads"])
        return cls(
            width=sizes["hidden_size"],
            mlp_width=sizes["intermediate_size"],
            num_heads=sizes["num_attention_heads"],
            num_layers=sizes["num_hidden_layers"] if states is None else max(states),
            stored_layers=sizes["num_hidden_layers"],
            patch=sizes["patch_size"],
            side=whole_patches(sizes["image_size"], sizes["patch_size"], "vision_config"),
            activation=activation_from_hf(vision, "hidden_act", "vision_config"),
            norm_eps=number_from_hf(vision, "layer_norm_eps", "vision_config"),
            has_last_norm=states is None,
        )

    def build(self) -> SiglipTower:
        """Returns the module."""
        return SiglipTower(self)

    def flops(self, grids: Grids) -> int:
        """Returns the FLOPs of these pictures in forward."""
        lengths = [rows * columns for rows, columns in grids]
        embedding = 2 * sum(lengths) * 3 * self.patch**2 * self.width
        return embedding + encoder_flops(lengths, width=self.width, mlp_width=self.mlp_width, depth=self.num_layers)


class _Embeddings(nn.Module):
    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, config.width, config.patch, config.patch)
        self.position_embedding = nn.Embedding(config.side**2, config.width)

    def forward(self, patches_NLF: Tensor) -> Tensor:
        kernel_VF = rearrange(self.patch_embedding.weight, "v c y x -> v (c y x)")
        return linear(patches_NLF, kernel_VF, self.patch_embedding.bias) + self.position_embedding.weight


class SiglipTower(nn.Module):
    """The tower."""

    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        from transformers.models.siglip.configuration_siglip import SiglipVisionConfig
        from transformers.models.siglip.modeling_siglip import SiglipEncoder

        encoder = SiglipVisionConfig(
            hidden_size=config.width,
            intermediate_size=config.mlp_width,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            hidden_act=config.activation,
            layer_norm_eps=config.norm_eps,
            attn_implementation="sdpa",
        )
        self.num_layers = config.num_layers
        self.embeddings = _Embeddings(config)
        self.encoder = SiglipEncoder(encoder)
        if config.has_last_norm:
            self.post_layernorm = nn.LayerNorm(config.width, eps=config.norm_eps)

    def forward(self, patches_NLF: Tensor, states: tuple[int, ...] | None = None) -> Tensor:
        """Returns [N, L, S * V]: what enters the first layer (state 0) or leaves layer i - 1 (state i); [N, L, V], what
        the last norm makes of all layers, where `states` is None, as in the config."""
        x = self.embeddings(patches_NLF)
        if states is not None:
            return outputs_of(self.encoder.layers, x, states, None)
        features: Tensor = self.post_layernorm(outputs_of(self.encoder.layers, x, (self.num_layers,), None))
        return features
