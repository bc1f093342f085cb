"""Arcee: Llama whose MLP has the square of a ReLU and no gate."""

from __future__ import annotations

from typing import Any

from engine.models.decoder_config import DecoderConfig
from engine.models.families.family import Family
from engine.models.families.reading import PRE_NORM_MODULES, check_activation, decoder_config
from engine.models.names import NameMap

NAMES = NameMap(
    layer_modules={name: place for name, place in PRE_NORM_MODULES.items() if name != "mlp.gate_proj"},
)

_DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Reads an Arcee `config.json`.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    hf = {**_DEFAULTS, **hf}
    check_activation(hf, "hidden_act", "relu2")
    return decoder_config(hf, "arcee", activation="relu2", mlp_bias=bool(hf.get("mlp_bias", False)))


FAMILY = Family(config_from_hf, NAMES)
