"""LLaVA: features of a tower's inner layers, through two linears.

Legend: N images, L patches of each, F numbers of a patch, S outputs of layers that are taken, V the tower's width,
D the decoder's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from engine.errors import UserError
from engine.vision.tower_defaults import CLIP, SIGLIP
from engine.vision.towers.clip import ClipConfig
from engine.vision.towers.siglip import SiglipConfig
from engine.vision.towers.sizes import Grid, Grids, activation_from_hf, check_grids, counts_from_hf, vision_part
from engine.vision.towers.tiles import run_by_length

_TOWERS: dict[str, type[ClipConfig] | type[SiglipConfig]] = {
    CLIP: ClipConfig,
    SIGLIP: SiglipConfig,
}
"""By model_type of `vision_config`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectorConfig:
    """The two linears between tower and decoder.

    Args:
        inputs, width: features that come in, and that the decoder has.
        bias: whether they have biases.
        activation: between them, as transformers names it.
    """

    inputs: int
    width: int
    bias: bool
    activation: str

    @property
    def flops_per_row(self) -> int:
        """FLOPs of a feature row in forward."""
        return 2 * self.width * (self.inputs + self.width)


class Projector(nn.Module):
    """y = linear_2(activation(linear_1(x)))."""

    def __init__(self, config: ProjectorConfig) -> None:
        super().__init__()
        from transformers.activations import ACT2FN

        self.linear_1 = nn.Linear(config.inputs, config.width, bias=config.bias)
        self.act = ACT2FN[config.activation]
        self.linear_2 = nn.Linear(config.width, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear_2(self.act(self.linear_1(x)))
        return y


@dataclass(frozen=True, kw_only=True, slots=True)
class LlavaVisionConfig:
    """Sizes of tower and projector.

    Args:
        states: the layers' outputs that are features, side by side; see `taken_states`.
        first: of a layer's outputs, those before it are no features.
    """

    tower: ClipConfig | SiglipConfig
    projector: ProjectorConfig
    states: tuple[int, ...]
    first: int

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], width: int) -> LlavaVisionConfig:
        """Reads a `config.json`.

        Args:
            width: of the decoder.

        Raises:
            UserError: it has another kind of tower, or something is missing or does not fit.
        """
        vision = vision_part(hf)
        kind = vision["model_type"]
        if kind not in _TOWERS:
            raise UserError(
                f"config.json has a vision tower of type {kind!r}, but a {hf.get('model_type')} model is supported "
                f"with {' or '.join(_TOWERS)}: use a model with that."
            )
        states = taken_states(hf, vision, default=-2)
        tower = _TOWERS[kind].from_hf(vision, states)
        strategy = select_strategy(hf, default="default")
        return cls(
            tower=tower,
            projector=projector_from_hf(hf, tower.width * len(states), width),
            states=states,
            first=1 if strategy == "default" else 0,
        )

    def build(self) -> LlavaVision:
        """Returns the module."""
        return LlavaVision(self)

    @property
    def rows_per_tile(self) -> int:
        """Feature rows of one image."""
        return self.tower.side**2 + int(self.tower.has_class) - self.first

    @property
    def patch_features(self) -> int:
        """Numbers of a patch."""
        return self.tower.patch_features

    @property
    def usual_tile(self) -> tuple[int, int]:
        """Rows and columns, in patches, of an image."""
        return self.tower.usual_tile

    def num_features(self, grid: Grid) -> int:
        """Returns the feature rows of an image."""
        return self.rows_per_tile

    def flops(self, grids: Grids) -> int:
        """Returns the FLOPs of these images in forward."""
        return self.tower.encoder_flops(grids) + len(grids) * self.rows_per_tile * self.projector.flops_per_row


def taken_states(hf: Mapping[str, Any], vision: Mapping[str, Any], *, default: int) -> tuple[int, ...]:
    """Reads which outputs of the tower's layers are features: 0 is what enters the first layer, i what leaves layer
    i - 1.

    Raises:
        UserError: there is no such layer, or no number of layers.
    """
    count = counts_from_hf(vision, ("num_hidden_layers",), "vision_config")["num_hidden_layers"]
    given = hf.get("vision_feature_layer", default)
    layers = given if isinstance(given, list) else [given]
    if not layers or not all(isinstance(one, int) and -count - 1 <= one <= count for one in layers):
        raise UserError(
            f"config.json has vision_feature_layer {given!r}, but a tower of {count} layers is expected to give the "
            f"outputs of whole numbers from {-count - 1} to {count}: correct it or copy it again."
        )
    return tuple(one % (count + 1) for one in layers)


def select_strategy(hf: Mapping[str, Any], *, default: str) -> str:
    """Reads which of a layer's outputs are features: all ("full"), or all but the first ("default").

    Raises:
        UserError: it is something else.
    """
    if (strategy := hf.get("vision_feature_select_strategy", default)) not in ("default", "full"):
        raise UserError(
            f"config.json has vision_feature_select_strategy {strategy!r}, but default or full is expected: correct it "
            "or copy it again."
        )
    return str(strategy)


def projector_from_hf(hf: Mapping[str, Any], inputs: int, width: int) -> ProjectorConfig:
    """Reads the projector.

    Raises:
        UserError: its activation is not known.
    """
    return ProjectorConfig(
        inputs=inputs,
        width=width,
        bias=bool(hf.get("multimodal_projector_bias", True)),
        activation=activation_from_hf({"projector_hidden_act": "gelu", **hf}, "projector_hidden_act"),
    )


class LlavaVision(nn.Module):
    """Tower and projector."""

    def __init__(self, config: LlavaVisionConfig) -> None:
        super().__init__()
        self.config = config
        self.vision_tower = config.tower.build()
        self.multi_modal_projector = Projector(config.projector)

    def forward(self, patches_PF: Tensor, grids: Grids) -> Tensor:
        """Returns the feature rows of all images, [K, D].

        Args:
            patches_PF: image after image, each row by row, flattened as (channel, y, x), normalised.
            grids: rows and columns of each image, which are the tower's.
        """
        check_grids(grids, self.config.tower.side)
        return run_by_length(patches_PF, grids, self._features, self.config.projector.width)

    def _features(self, patches_NLF: Tensor, grids: Grids) -> Tensor:
        outputs = self.vision_tower(patches_NLF, self.config.states)
        features: Tensor = self.multi_modal_projector(outputs[:, self.config.first :])
        return features
