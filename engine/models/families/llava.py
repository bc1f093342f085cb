"""LLaVA: a language model with a CLIP tower and two linears in front of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.models.decoder_config import DecoderConfig
from engine.models.families.wrapping import Wrapping, spellings

_SPELLINGS = spellings(("vision_tower", "multi_modal_projector"), inner={"vision_tower": "vision_model"})


def _complete(text: DecoderConfig, hf: dict[str, Any]) -> DecoderConfig:
    # where no picture is looked at, the packages that vision models need may be missing
    from engine.models.vision.llava import LlavaVisionConfig

    return replace(text, vision=LlavaVisionConfig.from_hf(hf, text.hidden))


def _unused(hf: dict[str, Any]) -> tuple[str, ...]:
    """Returns patterns of the tower's tensors behind the features that are taken."""
    from engine.models.vision.llava import LlavaVisionConfig

    tower = LlavaVisionConfig.from_hf(hf, 1).tower
    layers = (f"*vision_tower.*layers.{index}.*" for index in range(tower.num_layers, tower.stored_layers))
    return (*layers, "*vision_tower.*post_layernorm.*", "*vision_tower.*position_ids")


LLAVA = Wrapping(complete=_complete, spellings=_SPELLINGS, unused=_unused)
