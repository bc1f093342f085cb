"""Llama 2, 3 and 3.1+: plain pre-norm decoder with grouped-query attention and SwiGLU.

Checkpoints that store query, key and value (`qkv_proj`), or gate and up (`gate_up_proj`), as one matrix are known by
their tensors' names; their config.json does not say so. See `engine.models.names.nest`.
"""

from __future__ import annotations

from typing import Any

from engine.models.decoder_config import DecoderConfig
from engine.models.families.family import Family
from engine.models.families.reading import NAMES, check_activation, decoder_config, rope_from_hf

__all__ = ["NAMES", "config_from_hf", "rope_from_hf"]


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Reads a Llama `config.json`.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    check_activation(hf, "hidden_act", "silu")
    return decoder_config(hf, "llama", mlp_bias=bool(hf.get("mlp_bias", False)))


FAMILY = Family(config_from_hf)
