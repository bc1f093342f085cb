"""The tables of model families: Hugging Face `model_type` -> the family that reads its config and names its tensors.

A family's module is imported where a model of it is first read.
"""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from engine.choices import Implementation
from engine.errors import UserError
from engine.models.families.checking import check_kinds, part_of
from engine.models.families.family import Family
from engine.models.families.reading import REQUIRED
from engine.models.names import part_rows
from engine.seams import resolve
from engine.size_limits import check_sizes

FAMILIES = {
    "arcee": "engine.models.families.arcee:FAMILY",
    "bamba": "engine.hybrids.families.mamba:BAMBA",
    "cogagent": "engine.vision.families.cogvlm:COGAGENT",
    "cogvlm": "engine.vision.families.cogvlm:COGVLM",
    "cogvlm2": "engine.vision.families.cogvlm:COGVLM",
    "deepseek_v2": "engine.experts.families.deepseek:V2",
    "deepseek_v3": "engine.experts.families.deepseek:V3",
    "deepseek_v32": "engine.experts.families.deepseek:V32",
    "ernie4_5": "engine.models.families.ernie4_5:FAMILY",
    "ernie4_5_moe": "engine.experts.families.ernie4_5:FAMILY",
    "exaone4": "engine.models.families.exaone4:FAMILY",
    "falcon_h1": "engine.hybrids.families.falcon:FALCON_H1",
    "gemma2": "engine.models.families.gemma2:FAMILY",
    "gemma3_text": "engine.models.families.gemma3:FAMILY",
    "gemma4_text": "engine.gemma4.family:TEXT",
    "gemma4_unified_text": "engine.gemma4.family:UNIFIED_TEXT",
    "glm": "engine.models.families.glm:GLM",
    "glm4": "engine.models.families.glm:GLM4",
    "glm4_moe": "engine.experts.families.routed:GLM4_MOE",
    "glm4_moe_lite": "engine.experts.families.deepseek:GLM4_LITE",
    "glm_moe_dsa": "engine.experts.families.deepseek:GLM_DSA",
    "gpt_oss": "engine.experts.families.gpt_oss:FAMILY",
    "granite": "engine.models.families.granite:FAMILY",
    "granitemoehybrid": "engine.hybrids.families.mamba:GRANITE_HYBRID",
    "hunyuan_v1_dense": "engine.models.families.hunyuan:FAMILY",
    "hunyuan_v1_moe": "engine.experts.families.hunyuan:FAMILY",
    "kimi_k2": "engine.experts.families.deepseek:V3",
    "kimi_linear": "engine.hybrids.families.kimi:KIMI_LINEAR",
    "lfm2": "engine.hybrids.families.lfm2:LFM2",
    "lfm2_moe": "engine.hybrids.families.lfm2:LFM2_MOE",
    "llama": "engine.models.families.llama:FAMILY",
    "minicpm": "engine.models.families.minicpm:FAMILY",
    "minicpmv": "engine.vision.families.minicpm_v:FAMILY",
    "minimax_m2": "engine.experts.families.routed:MINIMAX_M2",
    "ministral3": "engine.models.families.ministral3:FAMILY",
    "mistral": "engine.models.families.mistral:FAMILY",
    "mixtral": "engine.experts.families.routed:MIXTRAL",
    "nemotron_h": "engine.hybrids.families.nemotron:FAMILY",
    "olmo2": "engine.models.families.olmo2:FAMILY",
    "olmo3": "engine.models.families.olmo3:FAMILY",
    "olmo_hybrid": "engine.hybrids.families.olmo:OLMO_HYBRID",
    "olmoe": "engine.experts.families.routed:OLMOE",
    "omnilmm": "engine.vision.families.omnilmm:FAMILY",
    "phi3": "engine.models.families.phi3:FAMILY",
    "qwen2": "engine.models.families.qwen2:FAMILY",
    "qwen2_5_vl_text": "engine.vision.families.qwen_vl:QWEN2_5_VL_TEXT",
    "qwen2_moe": "engine.experts.families.routed:QWEN2_MOE",
    "qwen3": "engine.models.families.qwen3:FAMILY",
    "qwen3_5_moe_text": "engine.hybrids.families.qwen:QWEN3_5_MOE_TEXT",
    "qwen3_5_text": "engine.hybrids.families.qwen:QWEN3_5_TEXT",
    "qwen3_moe": "engine.experts.families.routed:QWEN3_MOE",
    "qwen3_next": "engine.hybrids.families.qwen:QWEN3_NEXT",
    "qwen3_vl_text": "engine.vision.families.qwen_vl:QWEN3_VL_TEXT",
    "seed_oss": "engine.models.families.seed_oss:FAMILY",
    "smollm3": "engine.models.families.smollm3:FAMILY",
}
"""Language models, and models whose vision model is a part of the language model's family."""

WRAPPINGS = {
    "gemma3": "engine.vision.families.gemma3:GEMMA3",
    "internvl": "engine.vision.families.internvl:INTERNVL",
    "llava": "engine.vision.families.llava:LLAVA",
    "llava_next": "engine.vision.families.llava:NEXT",
    "llava_onevision": "engine.vision.families.llava:ONEVISION",
    "minicpmv4_6": "engine.vision.families.minicpm_v4_6:MINICPM_V4_6",
    "minicpmv4_7": "engine.vision.families.minicpm_v4_6:MINICPM_V4_7",
    "qwen2_5_vl": "engine.vision.families.qwen_vl:QWEN2_5_VL",
    "qwen3_5": "engine.vision.families.qwen_vl:QWEN3_5",
    "qwen3_5_moe": "engine.vision.families.qwen_vl:QWEN3_5_MOE",
    "qwen3_vl": "engine.vision.families.qwen_vl:QWEN3_VL",
}
"""Models that are a vision model in front of one of these families."""

ADOPTED = "engine.adopted.config:adopted_family"
"""The family of a model that has none of these and that transformers has."""
ADOPTED_TYPES = "engine.adopted.structure:known_types"
ADOPTED_IMAGES = "engine.adopted.images.refusal:images_are_adopted"
IMAGES_REFUSED = "engine.adopted.images.refusal:images_refused"
"""Whether a model is adopted with its images, and why one that sees images is not."""
ADOPTED_IMAGE_FAMILY = "engine.adopted.images.family:AdoptedImages"
"""What reads the images of one that is; see `DecoderConfig.images`."""

_BY_ARCHITECTURE = {"CogVLMForCausalLM": "cogvlm", "CogAgentForCausalLM": "cogagent"}
"""Families whose released configs have no `model_type`."""

_MISSING = (
    (
        "mixture-of-experts layers of this kind",
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"),
    ),
    (
        "linear-attention or state-space layers",
        ("linear_num_key_heads", "ssm_cfg", "mamba_d_state", "mamba_n_heads"),
    ),
    ("multi-head latent attention of this kind", ("kv_lora_rank",)),
    ("vision tower or experts for image tokens", ("vision_config", "vision_encoder")),
)
"""What the decoder lacks, and the config keys that tell that a model has it."""


def family_named(name: str) -> Family:
    """Returns the family of this key of `FAMILIES`."""
    family: Family = resolve(FAMILIES[name])
    return family


def language_family(name: str, hf_config: dict[str, Any], implementation: Implementation) -> Family:
    """Returns the family of a language model.

    Args:
        name: of the family, as its DecoderConfig has it.
        hf_config: of the model, for one that is adopted.
        implementation: of its layers.
    """
    if name not in FAMILIES or implementation == "adopted":
        return family_of(hf_config, implementation)[0]
    family = family_named(name)
    is_own = implementation == "native" or _has_all_layers(family, _language_part(hf_config))
    return family if is_own else family_of(hf_config, implementation)[0]


def family_of(hf_config: dict[str, Any], implementation: Implementation = "auto") -> tuple[Family, dict[str, Any]]:
    """Returns the family of a `config.json`, and the part of it that the family reads, which describes the language
    model, or the whole where it describes a vision model too.

    The family's names know this model's sizes where those are in the config.

    Args:
        implementation: of its layers.

    Raises:
        UserError: the model type is absent or not supported; says what is missing where the config tells. A value is
            not of the kind that families read.
    """
    check_sizes(hf_config)
    text = hf_config = _with_model_type(hf_config)
    if not isinstance(hf_config.get("model_type") or "", str):
        raise UserError(f"config.json has model_type {hf_config['model_type']!r}, but text is expected: copy it again.")
    if implementation == "adopted":
        return _adopted(_adopted_part(hf_config))
    if (wrapping := WRAPPINGS.get(hf_config.get("model_type") or "")) is not None:
        check_kinds(hf_config)
        around = resolve(wrapping)
        if implementation == "auto" and not around.knows_text(hf_config) and resolve(ADOPTED_IMAGES)(hf_config):
            return _adopted(hf_config)
        try:
            text = around.text_config(hf_config)
        except UserError as refusal:
            raise UserError(_with_images_refused(str(refusal), hf_config, implementation)) from None
        inner, _ = family_of(text, "native")
        return around.family(inner, hf_config), hf_config
    if hf_config.get("model_type") not in FAMILIES:
        text = _adopted_part(hf_config) if implementation == "auto" else _language_part(hf_config)
        if text is hf_config and resolve(ADOPTED_IMAGES)(hf_config):
            return _adopted(text)
    model_type = text.get("model_type")
    if model_type not in FAMILIES:
        if implementation == "auto" and model_type in resolve(ADOPTED_TYPES)():
            return _adopted(text)
        raise UserError(_with_images_refused(_refusal(model_type, text, implementation), hf_config, implementation))
    check_kinds(text)
    family = family_named(str(model_type))
    if implementation == "auto" and not _has_all_layers(family, text):
        return _adopted(text)
    if all(text.get(key) is not None for key in REQUIRED):
        names = replace(family.names, rows=part_rows(family.config_from_hf(text)))
        if family.unused is not None:
            names = replace(names, unused=family.unused(text))
        family = family._replace(names=names.fuse(family.fused))
    return family, text


def _has_all_layers(family: Family, text: dict[str, Any]) -> bool:
    return family.computes is None or family.computes(text)


def _language_part(hf_config: dict[str, Any]) -> dict[str, Any]:
    return part_of(hf_config, "text_config") or part_of(hf_config, "llm_config") or hf_config


def _adopted_part(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of a config that is adopted: the whole where transformers' model sees images."""
    return hf_config if resolve(ADOPTED_IMAGES)(hf_config) else _language_part(hf_config)


def _adopted(text: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """Returns what `family_of` does, of a language model that is adopted."""
    if text.get("model_type") not in resolve(ADOPTED_TYPES)() and not resolve(ADOPTED_IMAGES)(text):
        raise UserError(
            f"model_type {text.get('model_type')!r} in config.json is none of transformers' causal language models, so "
            "that it cannot be adopted: use implementation auto."
        )
    family: Family = resolve(ADOPTED)(text)
    return family, text


def vision_left_out(hf_config: dict[str, Any], implementation: Implementation = "auto") -> str | None:
    """Returns one sentence where `family_of` reads a vision-language model as its language model alone, else None."""
    model_type = _with_model_type(hf_config).get("model_type")
    if model_type in FAMILIES or model_type in WRAPPINGS or "vision_config" not in hf_config:
        return None
    if resolve(ADOPTED_IMAGES)(hf_config):
        if implementation != "native":
            return None
        return (
            f"model_type {model_type!r} is read as its language model alone, since model.implementation is native; "
            "auto adopts it with its images."
        )
    refused = resolve(IMAGES_REFUSED)(hf_config)
    reason = "its vision part is not supported" if refused is None else f"its images are not ({refused.rstrip('.')})"
    hint = "; transformers' own folder, whose name ends in -hf, has both" if "llm_config" in hf_config else ""
    return f"model_type {model_type!r} is read as its language model alone; {reason}{hint}."


def _with_model_type(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config with the `model_type` that its architecture stands for, where it has none."""
    architectures = hf_config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    if hf_config.get("model_type") or not isinstance(first, str) or first not in _BY_ARCHITECTURE:
        return hf_config
    return {**hf_config, "model_type": _BY_ARCHITECTURE[first]}


def _with_images_refused(refusal: str, hf_config: dict[str, Any], implementation: Implementation) -> str:
    """Returns the refusal of a language model, with the reason why the whole model is not adopted with its images."""
    why = resolve(IMAGES_REFUSED)(hf_config) if implementation == "auto" else None
    if why is None:
        return refusal
    return f"{refusal.rstrip('.')}; nor can the whole model be adopted with its images ({why.rstrip('.')})."


def _refusal(model_type: str | None, text: dict[str, Any], implementation: Implementation) -> str:
    every = sorted([*FAMILIES, *WRAPPINGS])
    near = get_close_matches(model_type or "", every, n=5) or ["llama", "mistral", "qwen3"]
    known = f"expected one of the engine's {len(every)} types, such as {', '.join(near)}"
    others = "with model.implementation auto " if implementation == "native" else ""
    known = f"{known}, or {others}a causal language model that the installed transformers has."
    architectures = text.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    kind = "a model without model_type" if model_type is None else f"model_type {model_type!r}"
    name = kind + (f" ({architecture})" if architecture else "")
    missing = [what for what, keys in _MISSING if any(text.get(key) for key in keys)]
    if not missing:
        return f"{name} in config.json is not supported: {known}"
    lacking = f"no {missing[0]}" if len(missing) == 1 else f"neither {' nor '.join(missing)}"
    return f"{name} in config.json is not supported, because the decoder has {lacking}: {known}"
