"""SmolLM3: Llama where every fourth layer's queries and keys are not rotated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.models.decoder_config import DecoderConfig
from engine.models.families.family import Family
from engine.models.families.reading import check_activation, check_required, decoder_config, windows_from_hf
from engine.models.layer_records import PLAIN_LAYER, LayerKind
from engine.models.ropes import Rope

_DEFAULTS = {
    "num_key_value_heads": 4, "rope_theta": 2000000.0, "tie_word_embeddings": True, "no_rope_layer_interval": 4
}  # fmt: skip


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Reads a SmolLM3 `config.json`.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    check_required(hf, "smollm3")
    hf = {**_DEFAULTS, **hf}
    check_activation(hf, "hidden_act", "silu")
    count, interval = int(hf["num_hidden_layers"]), int(hf["no_rope_layer_interval"])
    turned = hf.get("no_rope_layers") or [(index + 1) % interval != 0 for index in range(count)]
    kinds: tuple[LayerKind, ...] = (PLAIN_LAYER,) * count
    if hf.get("use_sliding_window", False):
        types = ["full_attention" if turns else "sliding_attention" for turns in turned]
        kinds = windows_from_hf(hf, types) or kinds
    config = decoder_config(
        hf,
        "smollm3",
        mlp_bias=bool(hf.get("mlp_bias", False)),
        layer_kinds=tuple(replace(kind, second_rope=not turns) for kind, turns in zip(kinds, turned, strict=True)),
    )
    return replace(config, ropes=(*config.ropes, Rope(theta=None)))


FAMILY = Family(config_from_hf)
