"""Gemma 2: norms on both sides of attention and MLP, weights of norms next to 1, GeGLU, soft caps, every other layer
with a window."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engine.errors import UserError
from engine.models.decoder_config import DecoderConfig
from engine.models.families.family import Family
from engine.models.families.reading import (
    BOTH_NORMS_MODULES,
    check_activation,
    check_required,
    decoder_config,
    windows_from_hf,
)
from engine.models.layer_records import Multipliers
from engine.models.names import NameMap

NAMES = NameMap(layer_modules=BOTH_NORMS_MODULES)

_DEFAULTS = {
    "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
}  # fmt: skip


def check_gemma(hf: Mapping[str, Any]) -> None:
    """Raises UserError where a Gemma has another activation, or attention that sees what comes after."""
    check_activation(hf, "hidden_activation", "gelu_pytorch_tanh")
    if hf["sliding_window"] is None:
        raise UserError(
            f"config.json has sliding_window null, and layers of a {hf.get('model_type')} model have windows: "
            "correct it."
        )
    if hf.get("use_bidirectional_attention"):
        raise UserError(
            f"config.json has use_bidirectional_attention in a {hf.get('model_type')} model, and the decoder's "
            "attention is causal: use a generative model."
        )


def gemma_switches(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that Gemma 2 and 3 have in common."""
    return {
        "activation": "gelu_tanh",
        "norm_offset": 1.0,
        "norms": "both",
        "multipliers": Multipliers(embedding=math.sqrt(hf["hidden_size"])),
        "attention_scale": float(hf["query_pre_attn_scalar"]) ** -0.5,
        "logits_softcap": hf["final_logit_softcapping"],
    }


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Reads a Gemma 2 `config.json`.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    hf = {**_DEFAULTS, **hf}
    check_required(hf, "gemma2")
    check_gemma(hf)
    types = ["full_attention" if index % 2 else "sliding_attention" for index in range(hf["num_hidden_layers"])]
    return decoder_config(
        hf,
        "gemma2",
        attention_softcap=hf["attn_logit_softcapping"],
        layer_kinds=windows_from_hf(hf, types),
        **gemma_switches(hf),
    )


FAMILY = Family(config_from_hf, NAMES)
