"""ERNIE 4.5's dense models: Llama whose heads turn neighbouring features together, and biases everywhere if at all."""

from __future__ import annotations

from typing import Any

from engine.models.decoder_config import DecoderConfig
from engine.models.families.family import Family
from engine.models.families.reading import check_activation, decoder_config, filled

_DEFAULTS = {
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "tie_word_embeddings": True, "use_bias": False,
}  # fmt: skip


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Reads an ERNIE 4.5 `config.json`.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    hf = filled(hf, _DEFAULTS)
    check_activation(hf, "hidden_act", "silu")
    bias = bool(hf["use_bias"])
    return decoder_config(hf, "ernie4_5", qkv_bias=bias, out_bias=bias, mlp_bias=bias, interleaved=True)


FAMILY = Family(config_from_hf)
