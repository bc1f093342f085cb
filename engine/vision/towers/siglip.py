"""SigLIP's tower for images of one size: all layers and the last norm, or up to the last layer whose output is taken.

The layers are transformers'; the embeddings are ours, because patches come flattened. The pooling head is left out, as
language models read patches.

Legend: N images, L patches of each, F = 3 * patch ** 2, V width, S outputs that are taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import linear

from engine.vision.towers.encoders import EncoderConfig, outputs_of, sizes_from_hf


@dataclass(frozen=True, kw_only=True, slots=True)
class SiglipConfig(EncoderConfig):
    """Sizes of the tower.

    Args:
        has_last_norm: the last norm is computed.
    """

    has_last_norm: bool

    @classmethod
    def from_hf(cls, vision: Mapping[str, Any], states: tuple[int, ...] | None = None) -> SiglipConfig:
        """Reads `vision_config`, which leaves nothing out.

        Args:
            states: the layers' outputs that are taken, 0 for what enters the first; None for what the last norm makes
                of all layers.

        Raises:
            UserError: a size does not fit.
        """
        sizes = sizes_from_hf(vision, None if states is None else max(states))
        return cls(**sizes, has_last_norm=states is None)

    def build(self) -> SiglipTower:
        """Returns the module."""
        return SiglipTower(self)


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

        self.num_layers = config.num_layers
        self.embeddings = _Embeddings(config)
        self.encoder = SiglipEncoder(SiglipVisionConfig(**config.stock))
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
