"""OLMo 2: norms on what attention and MLP add, none on their inputs; queries and keys are normalised over all heads."""

from __future__ import annotations

from typing import Any

from engine.models.decoder_config import DecoderConfig
from engine.models.families.family import Family
from engine.models.families.reading import BOTH_NORMS_MODULES, check_activation, decoder_config
from engine.models.names import NameMap

_DEFAULTS = {"rms_norm_eps": 1e-5}

NAMES = NameMap(
    layer_modules={
        key: value for key, value in BOTH_NORMS_MODULES.items() if key not in ("input_norm", "post_attention_norm")
    }
)


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Reads an OLMo 2 `config.json`.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    hf = {**_DEFAULTS, **hf}
    check_activation(hf, "hidden_act", "silu")
    return decoder_config(hf, "olmo2", norms="outputs", qk_norm=True, qk_norm_over="all")


FAMILY = Family(config_from_hf, NAMES)
