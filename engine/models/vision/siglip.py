"""SigLIP as transformers has it: an encoder of square tiles of one size, with a stored position for each patch.

The encoder is transformers' own (`modeling_siglip`), whose names and numbers the checkpoints have; only the embeddings
are ours, because patches come flattened. The pooling head is left out: language models read patches.

Legend: N tiles, L patches of a tile, F = 3 * patch ** 2, V width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import linear

from engine.errors import UserError
from engine.models.vision.sizes import Grids, check_grids, counts_from_hf, square_side
from engine.models.vision.tiles import encoder_flops

_COUNTS = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "patch_size": 16, "image_size": 224,
}  # fmt: skip
"""What transformers takes for a size that `vision_config` leaves out."""
_SETTINGS = {"attention_dropout": 0.0, "num_channels": 3}
_ACTIVATIONS = ("gelu_pytorch_tanh", "gelu")
_MODEL_TYPES = ("siglip_vision_model", "siglip")


@dataclass(frozen=True, kw_only=True, slots=True)
class SiglipConfig:
    """Sizes of the tower.

    Args:
        width, mlp_width, num_heads: V and the others of a layer.
        num_layers: of the encoder.
        patch: pixels on a side of a patch.
        side: patches on a side of a tile.
        activation: of the MLP, by transformers' name.
        norm_eps: of every norm.
        has_head: the checkpoint has a pooling head, with which nothing is computed.
    """

    width: int
    mlp_width: int
    num_heads: int
    num_layers: int
    patch: int
    side: int
    activation: str
    norm_eps: float
    has_head: bool

    @classmethod
    def from_hf(cls, vision: object) -> SiglipConfig:
        """Reads the `vision_config` of a `config.json`.

        Raises:
            UserError: it is another tower, or a size does not fit.
        """
        if not isinstance(vision, Mapping):
            raise UserError("config.json lacks vision_config, which describes the vision tower: copy it again.")
        if (kind := vision.get("model_type")) not in _MODEL_TYPES:
            raise UserError(
                f"config.json has a vision tower of type {kind!r}, but {_MODEL_TYPES[0]} is expected: correct "
                "vision_config.model_type or copy it again."
            )
        sizes = counts_from_hf({**_COUNTS, **vision}, tuple(_COUNTS), "vision_config")
        for key, value in _SETTINGS.items():
            if vision.get(key, value) != value:
                raise UserError(
                    f"config.json has vision_config.{key} {vision[key]!r}, but {value!r} is expected: use a model with "
                    "that."
                )
        activation = vision.get("hidden_act", _ACTIVATIONS[0])
        if activation not in _ACTIVATIONS:
            raise UserError(
                f"config.json has vision_config.hidden_act {activation!r}, but {' or '.join(_ACTIVATIONS)} is "
                "expected: use a model with that."
            )
        width, heads = sizes["hidden_size"], sizes["num_attention_heads"]
        if width % heads:
            raise UserError(
                f"config.json has vision_config.hidden_size {width}, which does not divide into {heads} heads: correct "
                "it or copy it again."
            )
        return cls(
            width=width,
            mlp_width=sizes["intermediate_size"],
            num_heads=heads,
            num_layers=sizes["num_hidden_layers"],
            patch=sizes["patch_size"],
            side=square_side(sizes["image_size"], sizes["patch_size"], "vision_config"),
            activation=activation,
            norm_eps=_norm_eps(vision),
            has_head=vision.get("vision_use_head") is not False,
        )

    @property
    def patch_features(self) -> int:
        """F, numbers of a patch."""
        return 3 * self.patch**2

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns, in patches, of every tile."""
        return self.side, self.side

    def flops(self, num_tiles: int, *, num_layers: int | None = None) -> int:
        """Returns the FLOPs of so many tiles in forward.

        Args:
            num_layers: as of `SiglipTower.forward`.
        """
        length, depth = self.side**2, self.num_layers if num_layers is None else num_layers
        encoder = encoder_flops([length] * num_tiles, width=self.width, mlp_width=self.mlp_width, depth=depth)
        return 2 * num_tiles * length * self.patch_features * self.width + encoder


def _norm_eps(vision: Mapping[str, Any]) -> float:
    eps = vision.get("layer_norm_eps", 1e-6)
    if not isinstance(eps, int | float) or isinstance(eps, bool) or not eps > 0:
        raise UserError(
            f"config.json has vision_config.layer_norm_eps {eps!r}, but a number above 0 is expected: correct it or "
            "copy it again."
        )
    return float(eps)


class _Embeddings(nn.Module):
    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, config.width, config.patch, config.patch)
        self.position_embedding = nn.Embedding(config.side**2, config.width)

    def forward(self, patches_NLF: Tensor) -> Tensor:
        kernel_VF = rearrange(self.patch_embedding.weight, "v c y x -> v (c y x)")
        return linear(patches_NLF, kernel_VF, self.patch_embedding.bias) + self.position_embedding.weight


class SiglipTower(nn.Module):
    """The tower, from patches to features of patches."""

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
        self.config = config
        self.embeddings = _Embeddings(config)
        self.encoder = SiglipEncoder(encoder)
        self.post_layernorm = nn.LayerNorm(config.width, eps=config.norm_eps)

    def forward(self, patches_PF: Tensor, grids: Grids, *, num_layers: int | None = None) -> Tensor:
        """Returns [N, L, V], each tile row by row.

        Args:
            patches_PF: tile after tile, each row by row, flattened as (channel, y, x), normalised.
            grids: rows and columns of each tile, which are those of the config.
            num_layers: what comes out of so many layers, without the last norm; None for all layers and that norm.
        """
        check_grids(grids, self.config.side)
        x_NLV = self.embeddings(rearrange(patches_PF, "(n l) f -> n l f", n=len(grids)))
        for layer in self.encoder.layers[:num_layers]:
            x_NLV = layer(x_NLV, None)
        return self.post_layernorm(x_NLV) if num_layers is None else x_NLV
