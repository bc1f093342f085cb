"""The table of model families: Hugging Face `model_type` -> how to read its config and name its tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from engine.errors import UserError
from engine.experts.families import deepseek, gpt_oss, routed
from engine.models.decoder_config import DecoderConfig
from engine.models.families import gemma2, gemma3, granite, llama, minicpm, mistral, olmo2, phi3, qwen2, qwen3, smollm3
from engine.models.families.checking import check_kinds, part_of
from engine.models.families.reading import NAMES, REQUIRED
from engine.models.names import NameMap, part_rows
from engine.size_limits import check_sizes
from engine.vision.families import cogvlm, internvl, llava, minicpm_v, omnilmm, qwen_vl
from engine.vision.families import gemma3 as gemma3_vision
from engine.vision.families.wrapping import Wrapping


class Family(NamedTuple):
    """One `model_type`: how its config becomes a DecoderConfig, and where its tensors lie.

    Args:
        config_from_hf: reads the config.
        names: places of the tensors.
        fused: modules that every checkpoint of the family stores as one matrix; see `engine.models.names.FUSED`.
        unused: reads from the config which tensors of a checkpoint nothing is computed with; see `NameMap.unused`.
    """

    config_from_hf: Callable[[dict[str, Any]], DecoderConfig]
    names: NameMap = NAMES
    fused: tuple[str, ...] = ()
    unused: Callable[[dict[str, Any]], tuple[str, ...]] | None = None


FAMILIES: dict[str, Family] = {
    "cogagent": Family(cogvlm.config_from_hf, cogvlm.AGENT_NAMES, cogvlm.AGENT_FUSED, cogvlm.unused),
    "cogvlm": Family(cogvlm.config_from_hf, cogvlm.NAMES, cogvlm.FUSED, cogvlm.unused),
    "cogvlm2": Family(cogvlm.config_from_hf, cogvlm.NAMES, cogvlm.FUSED, cogvlm.unused),
    "deepseek_v2": Family(deepseek.v2_config_from_hf, deepseek.NAMES),
    "deepseek_v3": Family(deepseek.config_from_hf, deepseek.NAMES, unused=routed.later_tokens),
    "gemma2": Family(gemma2.config_from_hf, gemma2.NAMES),
    "gemma3_text": Family(gemma3.config_from_hf, gemma2.NAMES),
    "glm4_moe": Family(routed.glm4_moe, routed.GLM4_NAMES, unused=routed.later_tokens),
    "gpt_oss": Family(gpt_oss.config_from_hf, gpt_oss.NAMES),
    "granite": Family(granite.config_from_hf),
    "llama": Family(llama.config_from_hf),
    "minicpm": Family(minicpm.config_from_hf),
    "minicpmv": Family(minicpm_v.config_from_hf, minicpm_v.NAMES),
    "mistral": Family(mistral.config_from_hf),
    "mixtral": Family(routed.mixtral, routed.MIXTRAL_NAMES),
    "olmo2": Family(olmo2.config_from_hf, olmo2.NAMES),
    "olmoe": Family(routed.olmoe, routed.NAMES),
    "omnilmm": Family(omnilmm.config_from_hf, omnilmm.NAMES),
    "phi3": Family(phi3.config_from_hf, fused=phi3.FUSED),
    "qwen2": Family(qwen2.config_from_hf),
    "qwen2_5_vl_text": Family(qwen_vl.config_2_5),
    "qwen2_moe": Family(routed.qwen2_moe, routed.NAMES),
    "qwen3": Family(qwen3.config_from_hf),
    "qwen3_moe": Family(routed.qwen3_moe, routed.NAMES),
    "qwen3_vl_text": Family(qwen_vl.config_3),
    "smollm3": Family(smollm3.config_from_hf),
}

WRAPPINGS: dict[str, Wrapping] = {
    "gemma3": gemma3_vision.GEMMA3,
    "internvl": internvl.INTERNVL,
    "llava": llava.LLAVA,
    "llava_next": llava.NEXT,
    "llava_onevision": llava.ONEVISION,
    "qwen2_5_vl": qwen_vl.QWEN2_5_VL,
    "qwen3_vl": qwen_vl.QWEN3_VL,
}
"""Models that are a vision model in front of one of these families."""

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


def family_of(hf_config: dict[str, Any]) -> tuple[Family, dict[str, Any]]:
    """Returns the family of a `config.json`, and the part of it that the family reads, which describes the language
    model, or the whole where it describes a vision model too.

    The family's names know this model's sizes where those are in the config.

    Raises:
        UserError: the model type is absent or not supported; says what is missing where the config tells. A value is
            not of the kind that families read.
    """
    check_sizes(hf_config)
    text = hf_config = _with_model_type(hf_config)
    if not isinstance(hf_config.get("model_type") or "", str):
        raise UserError(f"config.json has model_type {hf_config['model_type']!r}, but text is expected: copy it again.")
    if (wrapping := WRAPPINGS.get(hf_config.get("model_type") or "")) is not None:
        return _wrapped(wrapping, hf_config), hf_config
    if hf_config.get("model_type") not in FAMILIES:
        text = part_of(hf_config, "text_config") or part_of(hf_config, "llm_config") or hf_config
    model_type = text.get("model_type")
    if model_type not in FAMILIES:
        raise UserError(_refusal(model_type, text))
    check_kinds(text)
    family = FAMILIES[model_type]
    if all(text.get(key) is not None for key in REQUIRED):
        names = replace(family.names, rows=part_rows(family.config_from_hf(text)))
        if family.unused is not None:
            names = replace(names, unused=family.unused(text))
        family = family._replace(names=names.fuse(family.fused))
    return family, text


def vision_left_out(hf_config: dict[str, Any]) -> str | None:
    """Returns one sentence where `family_of` reads a vision-language model as its language model alone, else None."""
    model_type = _with_model_type(hf_config).get("model_type")
    if model_type in FAMILIES or model_type in WRAPPINGS or "vision_config" not in hf_config:
        return None
    hint = "; transformers' own folder, whose name ends in -hf, has both" if "llm_config" in hf_config else ""
    return f"model_type {model_type!r} is read as its language model alone; its vision part is not supported{hint}."


def _wrapped(wrapping: Wrapping, hf_config: dict[str, Any]) -> Family:
    """Returns the family of a language model with a vision model in front of it."""
    check_kinds(hf_config)
    family, _ = family_of(wrapping.text_config(hf_config))

    def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
        return wrapping.complete(family.config_from_hf(wrapping.text_config(hf)), hf)

    names = replace(family.names, spellings=wrapping.spellings, parameters=wrapping.parameters)
    if wrapping.unused is not None:
        names = replace(names, unused=wrapping.unused(hf_config))
    return family._replace(config_from_hf=config_from_hf, names=names.live)


def _with_model_type(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config with the `model_type` that its architecture stands for, where it has none."""
    architectures = hf_config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    if hf_config.get("model_type") or not isinstance(first, str) or first not in _BY_ARCHITECTURE:
        return hf_config
    return {**hf_config, "model_type": _BY_ARCHITECTURE[first]}


def _refusal(model_type: str | None, text: dict[str, Any]) -> str:
    known = f"expected one of {', '.join(sorted([*FAMILIES, *WRAPPINGS]))}."
    architectures = text.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    kind = "a model without model_type" if model_type is None else f"model_type {model_type!r}"
    name = kind + (f" ({architecture})" if architecture else "")
    missing = [what for what, keys in _MISSING if any(text.get(key) for key in keys)]
    if not missing:
        return f"{name} in config.json is not supported: {known}"
    lacking = f"no {missing[0]}" if len(missing) == 1 else f"neither {' nor '.join(missing)}"
    return f"{name} in config.json is not supported, because the decoder has {lacking}: {known}"
