"""gpt-oss: experts with biases and a clamped gate, a router of chosen logits, attention with sinks and windows, YaRN.

Every second layer has a window. Checkpoints have all experts of a layer in one tensor, gate and up in turns, which
released ones store in MXFP4.
"""

from __future__ import annotations

from typing import Any

from engine.experts.families.routed import read_routed, requested_balance, routed_sizes
from engine.experts.layers.attention_sinks import AttentionSinks
from engine.models.decoder_config import DecoderConfig
from engine.models.families.family import Family
from engine.models.families.reading import PRE_NORM_MODULES, decoder_config, windows_from_hf
from engine.models.names import NameMap
from engine.models.stacked_parts import stacked

NAMES = NameMap(
    layer_modules={
        **{name: place for name, place in PRE_NORM_MODULES.items() if not name.startswith("mlp.")},
        "attention.sinks": "self_attn.sinks",
        "mlp.router": "mlp.router",
        **stacked("mlp.experts", alternates=True, transposed=True),
    },
    parameters=("attention.sinks",),
)
_DEFAULTS = {
    "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "sliding_window": 128, "attention_bias": True,
    "max_position_embeddings": 131072, "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
    "rope_theta": 150000.0, "router_aux_loss_coef": 0.001,
    "rope_parameters": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 4096,
    },
}  # fmt: skip


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Reads a gpt-oss `config.json`.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    hf = read_routed(hf, _DEFAULTS)
    sizes = routed_sizes(
        hf,
        usual=128,
        intermediate=int(hf.get("intermediate_size") or 1),
        renormalises=False,
        rounds=True,
        rule={"scores": "softmax of chosen", "has_bias": True},
        has_biases=True,
        balanced_by=requested_balance(hf),
        clamp=(float(hf["swiglu_alpha"]), float(hf["swiglu_limit"])),
    )
    layers = range(int(hf.get("num_hidden_layers") or 0))
    types = ["full_attention" if index % 2 else "sliding_attention" for index in layers]
    return decoder_config(hf, "gpt_oss", layer_kinds=windows_from_hf(hf, types), variants=(AttentionSinks(), sizes))


FAMILY = Family(config_from_hf, NAMES)
