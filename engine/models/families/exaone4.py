"""EXAONE 4: norms on what attention and MLP add, none on their inputs, and on each head's queries and keys. Where
layers have a window, those without one do not rotate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.models.decoder_config import DecoderConfig
from engine.models.families.family import Family
from engine.models.families.olmo2 import NAMES
from engine.models.families.reading import check_activation, check_required, decoder_config, windows_from_hf
from engine.models.layer_records import LayerKind
from engine.models.ropes import Rope

_DEFAULTS = {"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4}


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Reads an EXAONE 4 `config.json`.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    hf = {**_DEFAULTS, **hf}
    check_required(hf, "exaone4")
    check_activation(hf, "hidden_act", "silu")
    config = decoder_config(hf, "exaone4", norms="outputs", qk_norm=True, qkv_bias=False, out_bias=False)
    if hf["sliding_window"] is None:
        return config
    types = hf.get("layer_types") or [
        "sliding_attention" if (index + 1) % int(hf["sliding_window_pattern"]) else "full_attention"
        for index in range(config.num_layers)
    ]
    windows_from_hf(hf, types)
    window = int(hf["sliding_window"])
    sliding, full = LayerKind(window=window), LayerKind(second_rope=True)
    kinds = tuple(sliding if kind == "sliding_attention" else full for kind in types)
    return replace(config, layer_kinds=kinds, ropes=(*config.ropes, Rope(theta=None)))


FAMILY = Family(config_from_hf, NAMES)
