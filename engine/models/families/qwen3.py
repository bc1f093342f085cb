"""Qwen3: Llama with a norm on each head's queries and keys; its upper layers may have a window."""

from __future__ import annotations

from typing import Any

from engine.models.decoder_config import DecoderConfig
from engine.models.families.family import Family
from engine.models.families.qwen2 import upper_windows
from engine.models.families.reading import check_activation, decoder_config

_DEFAULTS = {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28}


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Reads a Qwen3 `config.json`.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    hf = {**_DEFAULTS, **hf}
    check_activation(hf, "hidden_act", "silu")
    return decoder_config(hf, "qwen3", qk_norm=True, layer_kinds=upper_windows(hf))


FAMILY = Family(config_from_hf)
