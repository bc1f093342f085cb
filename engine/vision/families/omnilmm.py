"""OmniLMM: Mistral, with an EVA-CLIP tower and a resampler below `model.`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.models.decoder_config import DecoderConfig
from engine.models.families import mistral
from engine.models.families.family import Family
from engine.models.families.reading import PRE_NORM_MODULES
from engine.models.names import NameMap
from engine.vision.layers.fronts import ImageTower

NAMES = NameMap(
    layer_modules=PRE_NORM_MODULES,
    vision={"vision_tower": "model.vision_tower", "resampler": "model.resampler"},
)


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Reads an OmniLMM `config.json`.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    # where no image is looked at, the packages that vision models need may be missing
    from engine.vision.towers.omnilmm import OmniLMMVisionConfig

    return replace(mistral.config_from_hf(hf), fronts=(ImageTower(model=OmniLMMVisionConfig.from_hf(hf)),))


FAMILY = Family(config_from_hf, NAMES)
