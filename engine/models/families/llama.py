"""Llama 2, 3 and 3.1+: plain pre-norm decoder with grouped-query attention and SwiGLU."""

from __future__ import annotations

from typing import Any

from engine.errors import UserError
from engine.models.config import DecoderConfig, RopeScaling
from engine.models.names import NameMap

NAMES = NameMap(
    layer_modules={
        "input_norm": "input_layernorm",
        "attention.q_proj": "self_attn.q_proj",
        "attention.k_proj": "self_attn.k_proj",
        "attention.v_proj": "self_attn.v_proj",
        "attention.o_proj": "self_attn.o_proj",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "mlp.gate_proj": "mlp.gate_proj",
        "mlp.up_proj": "mlp.up_proj",
        "mlp.down_proj": "mlp.down_proj",
    }
)


def rope_from_hf(hf: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Rotary base and scaling, from transformers 4's `rope_theta` + `rope_scaling` or 5's `rope_parameters`."""
    scaling = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    theta = float(scaling.get("rope_theta", hf.get("rope_theta", 10000.0)))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=float(scaling["factor"]))
    if kind == "llama3":
        return theta, RopeScaling(
            kind="llama3",
            factor=float(scaling["factor"]),
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_length=int(scaling["original_max_position_embeddings"]),
        )
    raise UserError(f"rope type {kind!r} in config.json is not supported: use a model with default, linear or llama3.")


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Reads a Llama `config.json`.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    required = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    if missing := [key for key in required if key not in hf]:
        raise UserError(f"config.json lacks {', '.join(missing)}: a Llama model's config has them all.")
    if (activation := hf.get("hidden_act", "silu")) != "silu":
        raise UserError(f"config.json has hidden_act {activation!r}, but a Llama MLP is SwiGLU: expected 'silu'.")
    theta, scaling = rope_from_hf(hf)
    heads = int(hf["num_attention_heads"])
    attention_bias = bool(hf.get("attention_bias", False))
    return DecoderConfig(
        family="llama",
        hidden=int(hf["hidden_size"]),
        intermediate=int(hf["intermediate_size"]),
        num_layers=int(hf["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(hf.get("num_key_value_heads") or heads),
        head_dim=int(hf.get("head_dim") or int(hf["hidden_size"]) // heads),
        vocab_size=int(hf["vocab_size"]),
        norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tied_embeddings=bool(hf.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=bool(hf.get("mlp_bias", False)),
        max_length=int(hf.get("max_position_embeddings", 2048)),
    )
