"""CLIP's tower for images of one size, up to the last layer whose output is taken.

The layers are transformers'; the embeddings are ours, because patches come flattened.

Legend: N images, L patches of each, F = 3 * patch ** 2, V width, S outputs that are taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from engine.vision.towers.encoders import EncoderConfig, outputs_of, sizes_from_hf


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipConfig(EncoderConfig):
    """Sizes of the tower."""

    has_class = True

    @classmethod
    def from_hf(cls, vision: Mapping[str, Any], states: tuple[int, ...]) -> ClipConfig:
        """Reads `vision_config`, which leaves nothing out.

        Args:
            states: the layers' outputs that are taken, see `taken_states`.

        Raises:
            UserError: a size does not fit.
        """
        return cls(**sizes_from_hf(vision, max(states)))

    def build(self) -> ClipTower:
        """Returns the module."""
        return ClipTower(self)


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

        self.embeddings = _Embeddings(config)
        self.pre_layrnorm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.encoder = CLIPEncoder(CLIPVisionConfig(**config.stock))

    def forward(self, patches_NLF: Tensor, states: tuple[int, ...]) -> Tensor:
        """Returns [N, 1 + L, S * V]: what enters the first layer (state 0) or leaves layer i - 1 (state i)."""
        x = self.pre_layrnorm(self.embeddings(patches_NLF))
        return outputs_of(self.encoder.layers, x, states, None)
