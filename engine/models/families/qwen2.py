"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values; its upper layers may have a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.models.decoder_config import DecoderConfig
from engine.models.families.family import Family
from engine.models.families.reading import check_activation, check_required, decoder_config, windows_from_hf
from engine.models.layer_records import LayerKind

_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}


def upper_windows(hf: Mapping[str, Any]) -> tuple[LayerKind, ...]:
    """Returns a window in the layers from `max_window_layers` on, where `use_sliding_window` is set."""
    if not hf.get("use_sliding_window", False):
        return ()
    count, first = int(hf["num_hidden_layers"]), int(hf["max_window_layers"])
    return windows_from_hf(hf, ["sliding_attention" if i >= first else "full_attention" for i in range(count)])


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Reads a Qwen2 `config.json`.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    check_required(hf, "qwen2")
    hf = {**_DEFAULTS, **hf}
    check_activation(hf, "hidden_act", "silu")
    return decoder_config(hf, "qwen2", qkv_bias=True, out_bias=False, layer_kinds=upper_windows(hf))


FAMILY = Family(config_from_hf)
