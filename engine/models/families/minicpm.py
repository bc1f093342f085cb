"""MiniCPM 1 and 2, and the language model of MiniCPM-V 2.0: Granite's formula under other names."""

from __future__ import annotations

import math
from typing import Any

from engine.errors import UserError
from engine.models.decoder_config import DecoderConfig
from engine.models.families.family import Family
from engine.models.families.reading import check_activation, check_required, decoder_config
from engine.models.layer_records import Multipliers

_FACTORS = ("scale_emb", "scale_depth", "dim_model_base")
_DEFAULTS = {"tie_word_embeddings": True}


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Reads a MiniCPM `config.json`.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    hf = {**_DEFAULTS, **hf}
    if missing := [key for key in _FACTORS if key not in hf]:
        raise UserError(
            f"config.json has model_type {hf.get('model_type')!r} and lacks {', '.join(missing)}: MiniCPM 1, 2 and "
            "MiniCPM-V 2.0 have them all; use one of these."
        )
    if hf.get("num_experts"):
        raise UserError("config.json has num_experts, and the decoder has no mixture of experts: use a dense MiniCPM.")
    check_required(hf, "minicpm")
    check_activation(hf, "hidden_act", "silu")
    return decoder_config(
        hf,
        "minicpm",
        multipliers=Multipliers(
            embedding=float(hf["scale_emb"]),
            branch=float(hf["scale_depth"]) / math.sqrt(hf["num_hidden_layers"]),
            head_input_divisor=float(hf["hidden_size"]) / float(hf["dim_model_base"]),
        ),
    )


FAMILY = Family(config_from_hf)
