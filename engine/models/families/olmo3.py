"""OLMo 3: OLMo 2 with a window in three of four layers, and a rotary embedding for either kind of layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.models.decoder_config import DecoderConfig
from engine.models.families.family import Family
from engine.models.families.olmo2 import NAMES
from engine.models.families.reading import (
    check_activation,
    check_required,
    decoder_config,
    rope_from_hf,
    windows_from_hf,
)
from engine.models.layer_records import PLAIN_LAYER
from engine.models.ropes import Rope

_DEFAULTS = {"rms_norm_eps": 1e-5, "sliding_window": 4096}
_THETA = 5e5


def _ropes(hf: dict[str, Any]) -> tuple[Rope, Rope]:
    """Returns RoPE of full-attention and of sliding-window layers; older configs scale and set the first alone."""
    both, older = hf.get("rope_parameters") or {}, hf.get("rope_scaling") or {}
    parts = (
        {"rope_theta": hf.get("rope_theta") or _THETA, **(both.get("full_attention") or {}), **older},
        {"rope_theta": _THETA, **(both.get("sliding_attention") or {})},
    )
    outside = {key: value for key, value in hf.items() if key not in ("rope_scaling", "rope_theta")}
    ropes = [rope_from_hf({**outside, "rope_parameters": part}) for part in parts]
    everything, window = (Rope(theta=theta, scaling=scaling) for theta, scaling in ropes)
    return everything, window


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Reads an OLMo 3 `config.json`.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    hf = {**_DEFAULTS, **hf}
    check_required(hf, "olmo3")
    check_activation(hf, "hidden_act", "silu")
    count = int(hf["num_hidden_layers"])
    types = ["sliding_attention" if (index + 1) % 4 else "full_attention" for index in range(count)]
    kinds = windows_from_hf(hf, types) or (PLAIN_LAYER,) * count
    return decoder_config(
        hf,
        "olmo3",
        norms="outputs",
        qk_norm=True,
        qk_norm_over="all",
        ropes=_ropes(hf),
        layer_kinds=tuple(replace(kind, second_rope=kind.window is not None) for kind in kinds),
    )


FAMILY = Family(config_from_hf, NAMES)
