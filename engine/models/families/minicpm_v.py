"""MiniCPM-V: a language model of another family, with a SigLIP tower and a resampler.

2.0 has MiniCPM, MiniCPM-Llama3-V 2.5 has Llama 3, 2.6 has Qwen2. All keep the language model's sizes at the top of
`config.json`, and its tensors below `llm.`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UserError
from engine.layers.vision import VisionConfig
from engine.models.decoder_config import DecoderConfig
from engine.models.families import llama, minicpm, qwen2
from engine.models.families.reading import PRE_NORM_MODULES
from engine.models.names import NameMap

NAMES = NameMap(
    layer_modules=PRE_NORM_MODULES,
    body="llm.model.",
    head="llm.lm_head",
    vision={"vpm": "vpm", "resampler": "resampler"},
)

_BY_TOWER = {
    "siglip": qwen2.config_from_hf,
    "siglip_vision_model": qwen2.config_from_hf,
    "idefics2": llama.config_from_hf,
    "idefics2_vision": llama.config_from_hf,
}
"""Reads the language model, by the `model_type` of the tower; 2.0 names its tower in another way."""


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Reads a MiniCPM-V `config.json`.

    Raises:
        UserError: a required key is missing, or it is another version.
    """
    if "vision_config" not in hf:
        decoder = minicpm.config_from_hf({"tie_word_embeddings": False, **hf})
        return decoder if "vision_encoder" not in hf else replace(decoder, vision=_vision(hf))
    tower = hf["vision_config"].get("model_type") if isinstance(hf["vision_config"], dict) else None
    if tower not in _BY_TOWER or str(hf.get("version") or "2.5") not in ("2.5", "2.6"):
        raise UserError(
            f"config.json has version {hf.get('version')!r} and a tower of type {tower!r}, but of MiniCPM-V the "
            "versions 2.0, 2.5 and 2.6 are supported: use one of these."
        )
    return replace(_BY_TOWER[tower](hf), vision=_vision(hf))


def _vision(hf: dict[str, Any]) -> VisionConfig:
    # where no picture is looked at, the packages that vision models need may be missing
    from engine.models.vision.minicpm_v2 import MiniCPMV2VisionConfig
    from engine.models.vision.minicpm_v2_6 import MiniCPMV26VisionConfig

    return (MiniCPMV26VisionConfig if "vision_config" in hf else MiniCPMV2VisionConfig).from_hf(hf)
