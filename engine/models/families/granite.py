"""Granite: Llama with factors on embeddings, scores, what layers add, and logits."""

from __future__ import annotations

from typing import Any

from engine.models.decoder_config import DecoderConfig
from engine.models.families.family import Family
from engine.models.families.reading import check_activation, decoder_config
from engine.models.layer_records import Multipliers


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Reads a Granite `config.json`.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    check_activation(hf, "hidden_act", "silu")
    return decoder_config(
        hf,
        "granite",
        mlp_bias=bool(hf.get("mlp_bias", False)),
        multipliers=Multipliers(
            embedding=float(hf.get("embedding_multiplier", 1.0)),
            branch=float(hf.get("residual_multiplier", 1.0)),
            logits_divisor=float(hf.get("logits_scaling", 1.0)),
        ),
        attention_scale=float(hf.get("attention_multiplier", 1.0)),
    )


FAMILY = Family(config_from_hf)
