"""Ministral 3: Mistral whose queries grow with their position, beside YaRN."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.models.decoder_config import DecoderConfig
from engine.models.families.checking import rope_value
from engine.models.families.family import Family
from engine.models.families.reading import check_activation, decoder_config, filled, original_length
from engine.models.layer_records import LayerKind
from engine.models.ropes import QueryGrowth

_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_DEFAULTS = {
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
    "rope_parameters": _ROPE,
}  # fmt: skip


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Reads a Ministral 3 `config.json`.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    hf = filled(hf, _DEFAULTS)
    check_activation(hf, "hidden_act", "silu")
    window = hf.get("sliding_window")
    kinds = (LayerKind(window=int(window)),) * int(hf.get("num_hidden_layers") or 0) if window else ()
    config = decoder_config(hf, "ministral3", qkv_bias=False, out_bias=False, layer_kinds=kinds)
    scaling = hf.get("rope_scaling") or hf["rope_parameters"]
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    growth = QueryGrowth(
        factor=float(rope_value(scaling, kind, "llama_4_scaling_beta")), length=original_length(scaling, hf, kind)
    )
    return replace(config, ropes=(*config.ropes, replace(config.ropes[0], growth=growth)))


FAMILY = Family(config_from_hf)
