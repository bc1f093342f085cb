"""InternVL3: a language model with InternViT in front of it, as transformers' `internvl` stores it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.models.decoder_config import DecoderConfig
from engine.vision.families.wrapping import Wrapping, spellings
from engine.vision.layers.fronts import ImageTower


def _complete(text: DecoderConfig, hf: dict[str, Any]) -> DecoderConfig:
    # where no image is looked at, the packages that vision models need may be missing
    from engine.vision.towers.internvl import InternVLVisionConfig

    return replace(text, fronts=(ImageTower(model=InternVLVisionConfig.from_hf(hf, text.hidden)),))


def _unused(hf: dict[str, Any]) -> tuple[str, ...]:
    """Returns patterns of the tower's tensors behind the features that are taken."""
    from engine.vision.towers.internvl import InternVLVisionConfig

    vision = InternVLVisionConfig.from_hf(hf, 1)
    layers = tuple(f"*vision_tower.*layer.{index}.*" for index in range(vision.num_layers, vision.stored_layers))
    norm = () if vision.last_norm else ("*vision_tower.layernorm.*",)
    return (*layers, *norm, "*vision_tower.*mask_token")


INTERNVL = Wrapping(
    complete=_complete, spellings=spellings(("vision_tower", "multi_modal_projector")), text="qwen2", unused=_unused
)
