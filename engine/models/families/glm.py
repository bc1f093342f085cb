"""GLM-4's dense models: half of each head rotated, neighbours together, and gate and up stored as one matrix.
Those of type `glm4` have norms on both sides of attention and MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.models.decoder_config import DecoderConfig
from engine.models.families.family import Family
from engine.models.families.reading import (
    BOTH_NORMS_MODULES,
    check_activation,
    decoder_config,
    filled,
    rotating_part,
    without_share,
)
from engine.models.names import GATE_UP, NameMap

BOTH_NORMS = NameMap(
    layer_modules={
        **BOTH_NORMS_MODULES,
        "attention_output_norm": "post_self_attn_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "mlp_output_norm": "post_mlp_layernorm",
    }
)

_DEFAULTS = {
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
}  # fmt: skip


def _read(hf: dict[str, Any], family: str, **more: Any) -> DecoderConfig:
    hf = filled(hf, _DEFAULTS)
    check_activation(hf, "hidden_act", "silu")
    config = decoder_config(without_share(hf), family, out_bias=False, **more)
    return replace(rotating_part(config, hf, usual=0.5), interleaved=True)


def glm(hf: dict[str, Any]) -> DecoderConfig:
    """Reads the `config.json` of a GLM-4 of 2024.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    return _read(hf, "glm")


def glm4(hf: dict[str, Any]) -> DecoderConfig:
    """Reads the `config.json` of a GLM-4-0414.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    return _read(hf, "glm4", norms="both")


GLM = Family(glm, fused=(GATE_UP,))
GLM4 = Family(glm4, BOTH_NORMS, fused=(GATE_UP,))
