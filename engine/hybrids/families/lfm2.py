"""LFM2 and LFM2-MoE: short convolutions in most layers, attention with norms on queries and keys in the others, and an
MLP in each; the second has experts behind its first layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.experts.families.routed import routed_sizes
from engine.hybrids.layers.short_conv import NAME, ShortConvSizes
from engine.models.decoder_config import DecoderConfig
from engine.models.families.family import Family
from engine.models.families.reading import check_layer_types, check_required, decoder_config, filled
from engine.models.names import CORRECTION, NameMap

_MODULES = {
    "input_norm": "operator_norm",
    **{f"attention.{name}": f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")},
    "attention.o_proj": "self_attn.out_proj",
    "attention.q_norm": "self_attn.q_layernorm",
    "attention.k_norm": "self_attn.k_layernorm",
    **{f"{NAME}.{name}": f"conv.{name}" for name in ("in_proj", "conv", "out_proj")},
    "post_attention_norm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
NAMES = NameMap(layer_modules=_MODULES, ends={"norm": "embedding_norm"})
MOE_NAMES = NameMap(
    layer_modules={
        **_MODULES,
        "mlp.router": "feed_forward.gate",
        "mlp.experts.*.gate_proj": "feed_forward.experts.*.w1",
        "mlp.experts.*.up_proj": "feed_forward.experts.*.w3",
        "mlp.experts.*.down_proj": "feed_forward.experts.*.w2",
    },
    ends=NAMES.ends,
    tensors={f"mlp.router.{CORRECTION}": "feed_forward.expert_bias"},
)

_COMMON = {
    "num_key_value_heads": 8, "norm_eps": 1e-5, "max_position_embeddings": 128_000, "rope_theta": 1e6,
    "tie_word_embeddings": True, "conv_bias": False, "conv_L_cache": 3,
}  # fmt: skip
_LFM2 = {
    **_COMMON, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True,
}  # fmt: skip
_LFM2_MOE = {
    **_COMMON, "moe_intermediate_size": 1792, "num_dense_layers": 2, "num_experts_per_tok": 4, "use_expert_bias": True,
    "routed_scaling_factor": 1.0, "norm_topk_prob": True,
}  # fmt: skip


def _filled(hf: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config with its family's defaults, and by the names that other families have of the same things."""
    hf = filled(hf, defaults)
    if "tie_embedding" in hf:
        hf["tie_word_embeddings"] = hf["tie_embedding"]
    if "block_ff_dim" in hf:
        hf["intermediate_size"] = hf["block_ff_dim"]
    return {**hf, "rms_norm_eps": hf["norm_eps"]}


def _sizes(hf: Mapping[str, Any]) -> ShortConvSizes:
    types = hf.get("layer_types")
    if types is None:
        layers = range(int(hf["num_hidden_layers"]))
        attends = set(hf.get("full_attn_idxs", layers))
        types = ["full_attention" if index in attends else "conv" for index in layers]
    check_layer_types(hf, types, ("conv", "full_attention"))
    return ShortConvSizes(
        layers=tuple(index for index, kind in enumerate(types) if kind == "conv"),
        taps=int(hf["conv_L_cache"]),
        bias=bool(hf["conv_bias"]),
    )


def _mlp_width(hf: Mapping[str, Any]) -> int:
    """Returns the width of the MLP: that of the config, or two thirds of it, multiplied and rounded up."""
    width = int(hf["intermediate_size"])
    if not hf["block_auto_adjust_ff_dim"]:
        return width
    width = int(float(hf["block_ffn_dim_multiplier"]) * int(2 * width / 3))
    multiple = int(hf["block_multiple_of"])
    return max(1, -(-width // multiple)) * multiple


def lfm2(hf: dict[str, Any]) -> DecoderConfig:
    """Reads an LFM2 `config.json`.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    hf = _filled(hf, _LFM2)
    check_required(hf, "lfm2")
    return decoder_config({**hf, "intermediate_size": _mlp_width(hf)}, "lfm2", qk_norm=True, variants=(_sizes(hf),))


def lfm2_moe(hf: dict[str, Any]) -> DecoderConfig:
    """Reads an LFM2-MoE `config.json`: experts compared by sigmoids, with or without a correction, behind the first
    layers.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    hf = _filled(hf, _LFM2_MOE)
    check_required(hf, "lfm2_moe")
    sizes = routed_sizes(
        hf,
        usual=32,
        intermediate=int(hf["moe_intermediate_size"]),
        renormalises=bool(hf["norm_topk_prob"]),
        rounds=True,
        rule={
            "scores": "sigmoid", "has_correction": bool(hf["use_expert_bias"]), "least": 1e-6,
            "factor": float(hf["routed_scaling_factor"]),
        },
        dense_layers=tuple(range(int(hf["num_dense_layers"]))),
    )  # fmt: skip
    return decoder_config(hf, "lfm2_moe", qk_norm=True, variants=(_sizes(hf), sizes))


LFM2 = Family(lfm2, NAMES)
LFM2_MOE = Family(lfm2_moe, MOE_NAMES)
