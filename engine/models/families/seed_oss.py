"""Seed-OSS: Llama with biases on queries, keys and values."""

from __future__ import annotations

from typing import Any

from engine.models.decoder_config import DecoderConfig
from engine.models.families.family import Family
from engine.models.families.reading import check_activation, decoder_config

_DEFAULTS = {
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288, "attention_bias": True,
    "attention_out_bias": False,
}  # fmt: skip


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Reads a Seed-OSS `config.json`.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    hf = {**_DEFAULTS, **hf}
    check_activation(hf, "hidden_act", "silu")
    return decoder_config(
        hf, "seed_oss", out_bias=bool(hf["attention_out_bias"]), mlp_bias=bool(hf.get("mlp_bias", False))
    )


FAMILY = Family(config_from_hf)
