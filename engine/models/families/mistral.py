"""Mistral: Llama whose positions see a window of the ones before them."""

from __future__ import annotations

from typing import Any

from engine.models.decoder_config import DecoderConfig
from engine.models.families.family import Family
from engine.models.families.reading import check_activation, check_required, decoder_config
from engine.models.layer_records import LayerKind

_DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Reads a Mistral `config.json`.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    check_required(hf, "mistral")
    hf = {**_DEFAULTS, **hf}
    check_activation(hf, "hidden_act", "silu")
    window = hf["sliding_window"]
    kinds = () if window is None else (LayerKind(window=int(window)),) * int(hf["num_hidden_layers"])
    return decoder_config(hf, "mistral", qkv_bias=False, out_bias=False, layer_kinds=kinds)


FAMILY = Family(config_from_hf)
