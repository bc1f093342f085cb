"""ERNIE 4.5's mixtures: the dense models' attention, softmaxes compared with corrections, and shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.experts.families.routed import GLM4_NAMES, read_routed, routed_sizes
from engine.models.decoder_config import DecoderConfig
from engine.models.families.family import Family
from engine.models.families.reading import decoder_config, filled
from engine.models.names import CORRECTION

NAMES = replace(GLM4_NAMES, tensors={f"mlp.router.{CORRECTION}": f"mlp.moe_statics.{CORRECTION}"})

_DEFAULTS = {
    "num_key_value_heads": 4, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": True, "use_bias": False, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1, "moe_norm_min": 1e-12,
}  # fmt: skip
_EXPERTS = {"moe_k": ("num_experts_per_tok", 6), "moe_num_experts": ("num_experts", 64)}
"""Key -> what others call it, as this family's configs may too, and its default."""


def _dense_layers(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the layers with an MLP: all but every so many between two, with both, of which the second may be -1 for
    the last layer."""
    layers = range(int(hf["num_hidden_layers"]))
    first, last, step = (int(hf[f"moe_layer_{key}"]) for key in ("start_index", "end_index", "interval"))
    last = len(layers) - 1 if last == -1 else last
    return tuple(index for index in layers if not first <= index <= last or (index + 1) % step)


def ernie4_5_moe(hf: dict[str, Any]) -> DecoderConfig:
    """Reads the `config.json` of a mixture of ERNIE 4.5.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    hf = read_routed(filled(hf, _DEFAULTS), {}, ("use_bias", "output_router_logits"))
    for key, (usual_name, default) in _EXPERTS.items():
        hf[usual_name] = hf.get(key, hf.get(usual_name, default))
    intermediate = int(hf["moe_intermediate_size"])
    sizes = routed_sizes(
        hf,
        usual=64,
        intermediate=intermediate,
        renormalises=True,
        rounds=False,
        rule={
            "wide": True, "keeps_weight_wide": True, "has_correction": True, "correction_is_row": True,
            "smallest_sum": float(hf["moe_norm_min"]),
        },
        shared=int(hf["moe_num_shared_experts"]) * intermediate,
        gates_shared=False,
        dense_layers=_dense_layers(hf),
    )  # fmt: skip
    return decoder_config(hf, "ernie4_5_moe", qkv_bias=False, out_bias=False, interleaved=True, variants=(sizes,))


def later_tokens(hf: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns patterns of the tensors of layers that predict tokens after the next one."""
    return ("model.mtp_*",)


def _computes(hf: Mapping[str, Any]) -> bool:
    """Returns False where the head has a bias."""
    return not hf.get("use_bias")


FAMILY = Family(ernie4_5_moe, NAMES, unused=later_tokens, computes=_computes)
