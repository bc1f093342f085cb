"""The configs whose models are run: transformers' defaults, and what some types need beside them.

A default of transformers is not always a config with which its module runs: what a
released one has instead stands here.
"""

from __future__ import annotations

import json
from typing import Any

DECODERS = {"is_decoder": True}
_QWEN4_EXP: dict[str, Any] = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
MORE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            "bert",
            "big_bird",
            "camembert",
            "data2vec-text",
            "electra",
            "ernie",
            "megatron-bert",
            "reformer",
            "rembert",
            "roberta",
            "roberta-prelayernorm",
            "roc_bert",
            "roformer",
            "xlm-roberta",
            "xlm-roberta-xl",
            "xmod",
        ),
        DECODERS,
    ),
    "bert-generation": DECODERS,
    "big_bird": {**DECODERS, "attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }
    },
    "dbrx": {"attn_config": {"kv_n_heads": 8, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"moe_intermediate_size": 1408, "n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp": {"text_config": _QWEN4_EXP},
    "qwen4_exp_text": _QWEN4_EXP,
    "reformer": {**DECODERS, "axial_pos_embds": False, "attn_layers": ["local"] * 6},
    "xlm": {"causal": True},
    "xmod": {**DECODERS, "default_language": "en_XX"},
}
"""By type, what its config has in place of transformers' default."""


def config_of(model_type: str) -> dict[str, Any]:
    """Returns a `config.json` of a type that transformers has."""
    from transformers import CONFIG_MAPPING

    record = CONFIG_MAPPING[model_type](**MORE.get(model_type, {}))
    return {**json.loads(json.dumps(record.to_dict(), default=str)), "model_type": model_type}
