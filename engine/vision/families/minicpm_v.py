"""MiniCPM-V: a language model of another family, with a SigLIP tower and a resampler.

2.0 has MiniCPM, MiniCPM-Llama3-V 2.5 has Llama 3, 2.6 has Qwen2. All keep the language model's sizes at the top of
`config.json`, and its tensors below `llm.`.
"""

from __future__ import annotations

from typing import Any

from engine.models.decoder_config import DecoderConfig
from engine.models.families import llama, minicpm, qwen2
from engine.models.families.family import Family
from engine.models.families.reading import PRE_NORM_MODULES
from engine.models.names import NameMap
from engine.seams import resolve
from engine.vision.families.wrapping import with_tower
from engine.vision.minicpm_versions import minicpm_v_version

NAMES = NameMap(
    layer_modules=PRE_NORM_MODULES,
    body="llm.model.",
    head="llm.lm_head",
    vision={"vpm": "vpm", "resampler": "resampler"},
)

_BY_VERSION = {
    "2.0": (minicpm.config_from_hf, "engine.vision.towers.minicpm_v2:MiniCPMV2VisionConfig"),
    "2.5": (llama.config_from_hf, "engine.vision.towers.minicpm_v2_6:MiniCPMV26VisionConfig"),
    "2.6": (qwen2.config_from_hf, "engine.vision.towers.minicpm_v2_6:MiniCPMV26VisionConfig"),
}
"""Reads the language model, and the configuration that reads the vision model, imported where there is one: the
packages that vision models need may be missing."""


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Reads a MiniCPM-V `config.json`.

    Raises:
        UserError: a required key is missing, or it is another version.
    """
    if "vision_config" not in hf and "vision_encoder" not in hf and hf.get("version") is None:
        return minicpm.config_from_hf({"tie_word_embeddings": False, **hf})
    version = minicpm_v_version(hf)
    text = {"tie_word_embeddings": False, **hf} if version == "2.0" else hf
    read, tower = _BY_VERSION[version]
    return with_tower(read(text), resolve(tower).from_hf(hf))


FAMILY = Family(config_from_hf, NAMES)
