"""OmniLMM: Mistral, with an EVA-CLIP tower and a resampler below `model.`."""

from __future__ import annotations

from typing import Any

from engine.models.decoder_config import DecoderConfig
from engine.models.families import mistral
from engine.models.families.family import Family
from engine.models.families.reading import PRE_NORM_MODULES
from engine.models.names import NameMap
from engine.seams import resolve
from engine.vision.families.wrapping import with_tower

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
    tower = resolve("engine.vision.towers.omnilmm:OmniLMMVisionConfig")
    return with_tower(mistral.config_from_hf(hf), tower.from_hf(hf))


FAMILY = Family(config_from_hf, NAMES)
