"""Gemma 3's language model: Gemma 2 without caps, with a norm on each head's queries and keys, five layers with a
window to one without, and a rotary embedding for either kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UserError
from engine.models.decoder_config import DecoderConfig
from engine.models.families.family import Family
from engine.models.families.gemma2 import NAMES, check_gemma, gemma_switches
from engine.models.families.reading import check_required, decoder_config, rope_from_hf, windows_from_hf
from engine.models.layer_records import PLAIN_LAYER
from engine.models.ropes import Rope

_DEFAULTS = {
    "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 6,
    "final_logit_softcapping": None, "max_position_embeddings": 131072,
}  # fmt: skip


def _ropes(hf: dict[str, Any]) -> tuple[Rope, Rope]:
    """Returns RoPE of full-attention and of sliding-window layers, by transformers 4's keys or 5's
    `rope_parameters`."""
    both, older = hf.get("rope_parameters") or {}, hf.get("rope_scaling") or {}
    if "type" in older and "rope_type" not in older:
        raise UserError(
            f"config.json has rope_scaling of type {older['type']!r} under the key type, which transformers passes "
            "over in a Gemma 3 model: call it rope_type."
        )
    share = hf.get("partial_rotary_factor")
    parts = (
        {
            "rope_theta": hf.get("rope_theta") or 1e6,
            "partial_rotary_factor": share,
            **(both.get("full_attention") or {}),
            **older,
        },
        {
            "rope_theta": hf.get("rope_local_base_freq") or 1e4,
            "partial_rotary_factor": share,
            **(both.get("sliding_attention") or {}),
        },
    )
    ropes = [rope_from_hf({"rope_parameters": part}) for part in parts]
    everything, window = (Rope(theta=theta, scaling=scaling) for theta, scaling in ropes)
    return everything, window


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Reads a Gemma 3 text `config.json`, or the `text_config` of one with vision.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    hf = {**_DEFAULTS, **hf}
    check_required(hf, "gemma3_text")
    check_gemma(hf)
    if hf.get("attn_logit_softcapping"):
        raise UserError("config.json has attn_logit_softcapping, which a Gemma 3 model does not apply: set it to null.")
    count = int(hf["num_hidden_layers"])
    types = hf.get("layer_types") or [
        "sliding_attention" if (index + 1) % int(hf["sliding_window_pattern"]) else "full_attention"
        for index in range(count)
    ]
    kinds = windows_from_hf(hf, types) or (PLAIN_LAYER,) * count
    everything, window = _ropes(hf)
    assert everything.theta is not None
    return decoder_config(
        hf,
        "gemma3_text",
        qk_norm=True,
        ropes=(everything, window),
        layer_kinds=tuple(replace(kind, second_rope=kind.window is not None) for kind in kinds),
        **gemma_switches(hf),
    )


FAMILY = Family(config_from_hf, NAMES)
