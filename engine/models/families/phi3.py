"""Phi-3 and Phi-4-mini: Llama stored with fused matrices, part of each head rotated, and LongRoPE for long models.

LongRoPE has one set of factors for sequences up to the length of pretraining and another for longer ones. The latter is
chosen by the length of a sequence, which in a pack of several means nothing, so rows end at the former length.
"""

from __future__ import annotations

import math
from typing import Any

from engine.errors import UserError
from engine.models.decoder_config import DecoderConfig
from engine.models.families.checking import rope_value
from engine.models.families.family import Family
from engine.models.families.reading import (
    check_activation,
    check_required,
    decoder_config,
    original_length,
    rope_from_hf,
    rotating_part,
)
from engine.models.layer_records import LayerKind
from engine.models.names import GATE_UP, QKV
from engine.models.ropes import Rope, RopeScaling

FUSED = (QKV, GATE_UP)

_DEFAULTS = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, "max_position_embeddings": 4096}


def _longrope(scaling: dict[str, Any], hf: dict[str, Any]) -> tuple[RopeScaling, int]:
    """Returns the scaling of sequences up to a length, and that length: 4096 where the config itself, not its
    `rope_scaling`, does not say, as in transformers."""
    length = original_length(scaling, hf, "longrope")
    factor = scaling.get("factor") or int(hf["max_position_embeddings"]) / length
    table_scale = scaling.get("attention_factor")
    if table_scale is None:
        table_scale = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
    factors = tuple(float(factor) for factor in rope_value(scaling, "longrope", "short_factor"))
    return RopeScaling(kind="longrope", factors=factors, table_scale=float(table_scale)), length


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Reads a Phi-3 `config.json`.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    check_required(hf, "phi3")
    hf = {**_DEFAULTS, **hf}
    check_activation(hf, "hidden_act", "silu")
    for key in ("embd_pdrop", "resid_pdrop"):
        if hf.get(key):
            raise UserError(f"config.json has {key} {hf[key]}, and the decoder drops no activations: set {key} to 0.")
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    scaling: RopeScaling | None
    limit: int | None
    if rope.get("rope_type", rope.get("type")) in ("longrope", "su", "yarn"):
        theta = float(rope.get("rope_theta", hf.get("rope_theta", 10000.0)))
        scaling, limit = _longrope(rope, hf)
    else:
        (theta, scaling), limit = rope_from_hf(hf), None
        if scaling is not None:
            raise UserError(
                f"config.json has a rotary embedding of type {scaling.kind}, which a Phi-3 model does not have: use "
                "one with default or longrope."
            )
    window = hf.get("sliding_window")
    config = decoder_config(
        hf,
        "phi3",
        qkv_bias=False,
        out_bias=False,
        ropes=(Rope(theta=theta, scaling=scaling),),
        max_row_length=limit,
        layer_kinds=(LayerKind(window=int(window)),) * int(hf["num_hidden_layers"]) if window else (),
    )
    config = rotating_part(config, hf)
    rotary_dim = config.rotary_dim or config.head_dim
    if scaling is not None and len(scaling.factors) * 2 != rotary_dim:
        raise UserError(
            f"config.json has {len(scaling.factors)} numbers in short_factor for {rotary_dim} rotated features, "
            f"expected {rotary_dim // 2}: correct it or copy it again."
        )
    return config


FAMILY = Family(config_from_hf, fused=FUSED)
