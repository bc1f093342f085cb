"""InternVL3: InternViT for square tiles, neighbouring patches put together, and a norm and two linears.

The layers are transformers'; the embeddings are ours, because patches come flattened.

Legend: N tiles, L patches of each, F numbers of a patch, V the tower's width, D the decoder's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import linear

from engine.errors import UserError
from engine.vision.towers.encoders import EncoderConfig, outputs_of, sizes_from_hf
from engine.vision.towers.llava import Projector, ProjectorConfig, select_strategy, taken_states
from engine.vision.towers.sizes import Grid, Grids, activation_from_hf, check_grids, number_from_hf, vision_part
from engine.vision.towers.tiles import run_by_length


@dataclass(frozen=True, kw_only=True, slots=True)
class InternVLVisionConfig(EncoderConfig):
    """Sizes of tower and projector.

    Args:
        norm: of the layers.
        qkv_bias: whether queries, keys and values have biases.
        qk_norm: whether queries and keys have norms.
        has_positions: whether a table of positions is added.
        last_norm: whether there is a norm behind the last layer.
        first: of a layer's outputs, those before it are no features.
        together: patches on a side of a square that makes one feature row.
    """

    norm: Literal["layer_norm", "rms_norm"]
    qkv_bias: bool
    qk_norm: bool
    has_positions: bool
    last_norm: bool
    first: int
    together: int
    projector: ProjectorConfig

    has_class = True

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], width: int) -> InternVLVisionConfig:
        """Reads a `config.json`.

        Args:
            width: of the decoder.

        Raises:
            UserError: something is missing, does not fit, or is not what this tower has.
        """
        vision = vision_part(hf)
        vision |= {key: _square(vision[key], key) for key in ("image_size", "patch_size")}
        layer = hf.get("vision_feature_layer", -1)
        if isinstance(layer, list):
            raise UserError(
                f"config.json has vision_feature_layer {layer}, but an internvl model takes the features of one layer: "
                "correct it or copy it again."
            )
        (state,) = taken_states(hf, vision, default=-1)
        if (norm := vision.get("norm_type", "layer_norm")) not in ("layer_norm", "rms_norm"):
            raise UserError(
                f"config.json has vision_config.norm_type {norm!r}, but layer_norm or rms_norm is expected: correct it "
                "or copy it again."
            )
        sizes = sizes_from_hf(vision, state)
        first = 1 if select_strategy(hf, default="default") == "default" else 0
        together = _together(hf, sizes["side"], first)
        return cls(
            **sizes,
            norm=norm,
            qkv_bias=bool(vision.get("attention_bias", False)),
            qk_norm=bool(vision.get("use_qk_norm", False)),
            has_positions=bool(vision.get("use_absolute_position_embeddings", True)),
            last_norm=layer == -1 and not vision.get("use_mean_pooling", True),
            first=first,
            together=together,
            projector=ProjectorConfig(
                inputs=sizes["width"] * together**2,
                width=width,
                bias=True,
                activation=activation_from_hf({"projector_hidden_act": "gelu", **hf}, "projector_hidden_act"),
            ),
        )

    def build(self) -> InternVLVision:
        """Returns the module."""
        return InternVLVision(self)

    @property
    def rows_per_tile(self) -> int:
        """Feature rows of one tile."""
        return (self.side // self.together) ** 2

    def num_features(self, grid: Grid) -> int:
        """Returns the feature rows of a tile."""
        return self.rows_per_tile

    def flops(self, grids: Grids) -> int:
        """Returns the FLOPs of these tiles in forward."""
        return self.encoder_flops(grids) + len(grids) * self.rows_per_tile * self.projector.flops_per_row


def _square(size: object, key: str) -> object:
    """Returns the side of what may be given as two equal sides."""
    if not isinstance(size, list):
        return size
    if len(size) != 2 or size[0] != size[1]:
        raise UserError(
            f"config.json has vision_config.{key} {size}, but tiles and patches are squares here: use a model with two "
            "equal sides."
        )
    return size[0]


def _together(hf: Mapping[str, Any], side: int, first: int) -> int:
    ratio = number_from_hf({"downsample_ratio": 0.5, **hf}, "downsample_ratio")
    together = round(1 / ratio)
    if together * ratio != 1 or side % together or first == 0:
        strategy = hf.get("vision_feature_select_strategy", "default")
        raise UserError(
            f"config.json has downsample_ratio {ratio:g} and vision_feature_select_strategy {strategy}, for tiles of "
            f"{side} x {side} patches, which cannot be put together in equal squares: correct it or copy it again."
        )
    return together


class _PatchEmbeddings(nn.Module):
    def __init__(self, config: InternVLVisionConfig) -> None:
        super().__init__()
        self.projection = nn.Conv2d(3, config.width, config.patch, config.patch)


class _Embeddings(nn.Module):
    def __init__(self, config: InternVLVisionConfig) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.empty(1, 1, config.width))
        self.patch_embeddings = _PatchEmbeddings(config)
        if config.has_positions:
            self.position_embeddings = nn.Parameter(torch.empty(1, config.side**2 + 1, config.width))
        self.has_positions = config.has_positions

    def forward(self, patches_NLF: Tensor) -> Tensor:
        projection = self.patch_embeddings.projection
        patches = linear(patches_NLF, projection.weight.flatten(1), projection.bias)
        x = torch.cat([self.cls_token.expand(patches.shape[0], 1, -1), patches], dim=1)
        return x + self.position_embeddings if self.has_positions else x


class _Tower(nn.Module):
    def __init__(self, config: InternVLVisionConfig) -> None:
        super().__init__()
        from transformers.models.internvl.configuration_internvl import InternVLVisionConfig as StockConfig
        from transformers.models.internvl.modeling_internvl import InternVLVisionEncoder

        encoder = StockConfig(
            **config.stock,
            norm_type=config.norm,
            attention_bias=config.qkv_bias,
            use_qk_norm=config.qk_norm,
        )
        self.embeddings = _Embeddings(config)
        self.encoder = InternVLVisionEncoder(encoder)
        self.state = config.num_layers
        self.layernorm = nn.LayerNorm(config.width, eps=config.norm_eps) if config.last_norm else nn.Identity()

    def forward(self, patches_NLF: Tensor) -> Tensor:
        """Returns [N, 1 + L, V]."""
        x: Tensor = self.layernorm(outputs_of(self.encoder.layer, self.embeddings(patches_NLF), (self.state,)))
        return x


class _NormProjector(Projector):
    def __init__(self, config: ProjectorConfig) -> None:
        super().__init__(config)
        self.layer_norm = nn.LayerNorm(config.inputs)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.layer_norm(x))


class InternVLVision(nn.Module):
    """Tower and projector."""

    def __init__(self, config: InternVLVisionConfig) -> None:
        super().__init__()
        self.config = config
        self.vision_tower = _Tower(config)
        self.multi_modal_projector = _NormProjector(config.projector)

    def forward(self, patches_PF: Tensor, grids: Grids) -> Tensor:
        """Returns the feature rows of all tiles, [K, D].

        Args:
            patches_PF: tile after tile, each row by row, flattened as (channel, y, x), normalised.
            grids: rows and columns of each tile, which are the tower's.
        """
        check_grids(grids, self.config.side)
        return run_by_length(patches_PF, grids, self._features, self.config.projector.width)

    def _features(self, patches_NLF: Tensor, grids: Grids) -> Tensor:
        outputs = self.vision_tower(patches_NLF)[:, self.config.first :]
        squares = rearrange(
            outputs,
            "n (i a j b) v -> n (i j) (a b v)",
            a=self.config.together,
            b=self.config.together,
            i=self.config.side // self.config.together,
        )
        features: Tensor = self.multi_modal_projector(squares)
        return features
