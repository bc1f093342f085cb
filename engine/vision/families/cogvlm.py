"""CogVLM, CogVLM2 and CogAgent: Llama with weights of their own for the tokens of images.

Their released configs have no `model_type`: the architecture tells CogAgent from CogVLM, and `num_multi_query_heads`
CogVLM2. What their code has as constants, the config does not give: the base of the rotary embedding, and biases of the
vision expert's query, key and value. Of an image's tokens, boi and patches take the vision expert, eoi the text's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UserError
from engine.models.decoder_config import DecoderConfig
from engine.models.families.family import Family
from engine.models.families.reading import PRE_NORM_MODULES, check_activation, decoder_config
from engine.models.names import KEY_VALUE, QKV, VISION_QKV, NameMap
from engine.models.ropes import Rope
from engine.vision.layers.cross_attention import CrossAttentionSizes
from engine.vision.layers.fronts import ImageEncoder, ImageTower
from engine.vision.layers.token_experts import TokenExperts
from engine.vision.towers.cogagent import CrossVisionConfig
from engine.vision.towers.cogvlm import CogVLMVisionConfig

_ROPE_THETA = {"cogvlm2": 500000.0, "cogvlm": 10000.0, "cogagent": 10000.0}

FUSED = (QKV, VISION_QKV)
AGENT_FUSED = (*FUSED, KEY_VALUE)

_MODULES = {
    **{name: place for name, place in PRE_NORM_MODULES.items() if name.endswith("_norm")},
    **{f"attention.{name}_proj": f"self_attn.language_expert_{name}" for name in "qkv"},
    **{f"attention.vision.{name}_proj": f"self_attn.vision_expert_{name}" for name in "qkv"},
    "attention.o_proj": "self_attn.language_expert_dense",
    "attention.vision.o_proj": "self_attn.vision_expert_dense",
    **{f"mlp.{name}_proj": f"mlp.language_mlp.{name}_proj" for name in ("gate", "up", "down")},
    **{f"mlp.vision.{name}_proj": f"mlp.vision_mlp.{name}_proj" for name in ("gate", "up", "down")},
}

NAMES = NameMap(
    layer_modules=_MODULES,
    fused_names={
        QKV: "self_attn.language_expert_query_key_value",
        VISION_QKV: "self_attn.vision_expert_query_key_value",
    },
    vision={"vision": "model.vision"},
)
AGENT_NAMES = replace(
    NAMES,
    layer_modules={
        **_MODULES,
        "cross_attention_norm": "post_cross_attention_layernorm",
        **{f"cross_attention.{name}": f"cross_attn.{name}" for name in ("query", "key", "value", "dense")},
    },
    vision={"vision": "model.vision", "cross_vision": "model.cross_vision"},
)


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Reads the `config.json` of one of the three models.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    check_activation(hf, "hidden_act", "silu")
    agent, groups = hf.get("cross_hidden_size") is not None, hf.get("num_multi_query_heads")
    if hf.get("model_type") == "cogagent" and not agent:
        raise UserError("config.json lacks cross_hidden_size, the width of CogAgent's second encoder: copy it again.")
    family = "cogagent" if agent else "cogvlm" if groups is None else "cogvlm2"
    if (heads := hf.get("num_attention_heads")) and groups and heads % groups:
        raise UserError(
            f"config.json has {heads} num_attention_heads and {groups} num_multi_query_heads, but each key head serves "
            "equally many heads: correct it or copy it again."
        )
    variants, fronts = ((_cross_attention(hf),), (_encoder(hf),)) if agent else ((), ())
    return decoder_config(
        {"rms_norm_eps": 1e-5, **hf, "num_key_value_heads": groups},
        family,
        qkv_bias=False,
        out_bias=False,
        ropes=(Rope(theta=_ROPE_THETA[family]),),
        variants=(TokenExperts(qkv_bias=family == "cogvlm2"), *variants),
        fronts=(ImageTower(model=CogVLMVisionConfig.from_hf(hf)), *fronts),
    )


def _cross_attention(hf: dict[str, Any]) -> CrossAttentionSizes:
    encoded, width = int(hf["cross_hidden_size"]), int(hf.get("cross_compute_hidden_size") or 0)
    heads = int(hf.get("num_attention_heads") or 1)
    if width == 0 or width % heads:
        raise UserError(
            f"config.json has cross_compute_hidden_size {hf.get('cross_compute_hidden_size')}, which does not divide "
            f"into {heads} num_attention_heads: correct it or copy it again."
        )
    return CrossAttentionSizes(encoded=encoded, width=width)


def _encoder(hf: dict[str, Any]) -> ImageEncoder:
    return ImageEncoder(model=CrossVisionConfig.from_hf(hf), width=int(hf["cross_hidden_size"]))


def unused(hf: dict[str, Any]) -> tuple[str, ...]:
    """Returns patterns of the tensors that a checkpoint has and nothing is computed with."""
    tables = ("model.layers.*.self_attn.rotary_emb.inv_freq",)
    return tables if hf.get("cross_hidden_size") is None else tables + CrossVisionConfig.from_hf(hf).not_computed


COGVLM = Family(config_from_hf, NAMES, FUSED, unused)
COGAGENT = Family(config_from_hf, AGENT_NAMES, AGENT_FUSED, unused)
