"""LLaVA, LLaVA-NeXT and LLaVA-OneVision: a language model with a CLIP or SigLIP tower and two linears in front."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.models.decoder_config import DecoderConfig
from engine.vision.families.wrapping import Wrapping, spellings
from engine.vision.layers.fronts import ImageTower

if TYPE_CHECKING:
    from engine.vision.towers.llava import LlavaVisionConfig
    from engine.vision.towers.llava_tiles import TiledLlavaConfig

_ROOTS, _INNER = ("vision_tower", "multi_modal_projector"), {"vision_tower": "vision_model"}


def _vision(hf: dict[str, Any], width: int) -> LlavaVisionConfig | TiledLlavaConfig:
    # where no image is looked at, the packages that vision models need may be missing
    from engine.vision.towers.llava import LlavaVisionConfig
    from engine.vision.towers.llava_tiles import TiledLlavaConfig

    return (LlavaVisionConfig if hf["model_type"] == "llava" else TiledLlavaConfig).from_hf(hf, width)


def _complete(text: DecoderConfig, hf: dict[str, Any]) -> DecoderConfig:
    return replace(text, fronts=(ImageTower(model=_vision(hf, text.hidden)),))


def _unused(hf: dict[str, Any]) -> tuple[str, ...]:
    """Returns patterns of the tower's tensors behind the features that are taken."""
    tower = _vision(hf, 1).tower
    layers = (f"*vision_tower.*layers.{index}.*" for index in range(tower.num_layers, tower.stored_layers))
    return (*layers, *(f"*vision_tower.*{name}" for name in ("post_layernorm.*", "head.*", "position_ids")))


LLAVA = Wrapping(complete=_complete, spellings=spellings(_ROOTS, inner=_INNER), unused=_unused, either_ties=True)
NEXT = Wrapping(
    complete=_complete,
    spellings=spellings((*_ROOTS, "image_newline"), inner=_INNER),
    unused=_unused,
    parameters=("image_newline",),
    either_ties=True,
)
ONEVISION = NEXT._replace(text="qwen2")
