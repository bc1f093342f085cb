"""Small models of every family, by the names of their classes in transformers."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from packaging.version import Version

SMALL_SIZES = {
    "vocab_size": 67, "hidden_size": 40, "intermediate_size": 52, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 64, "attn_implementation": "eager",
    "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


_CLAMP = {"swiglu_limit": 0.8} if Version(version("transformers")) >= Version("5.23") else {}
"""Older versions clamp at 7, whatever the config says."""


_ONE_GROUP = {} if Version(version("transformers")) >= Version("5.23") else {"mamba_n_groups": 1}
"""Older versions' Bamba takes one mean of squares over all groups."""


FACTORS = {
    "embedding_multiplier": 12.0, "residual_multiplier": 0.7, "attention_multiplier": 0.31, "logits_scaling": 9.0
}  # fmt: skip


_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 700.0, "partial_rotary_factor": 0.5, "short_factor": [1.0, 1.3, 2.0],
    "long_factor": [2.0, 3.0, 4.0], "original_max_position_embeddings": 40,
}  # fmt: skip


_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 900.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0,
    "original_max_position_embeddings": 24,
}  # fmt: skip


_GEMMA = {"sliding_window": 7, "query_pre_attn_scalar": 11}


_GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}


_GEMMA4 = {
    "sliding_window": 7, "global_head_dim": 16, "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip


_GEMMA4_SMALL = {
    "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 67,
    "use_double_wide_mlp": True, "num_key_value_heads": 1,
}  # fmt: skip


_YARN = {
    "rope_type": "yarn", "rope_theta": 150.0, "factor": 4.0, "beta_fast": 3.0, "beta_slow": 0.5, "truncate": False,
    "original_max_position_embeddings": 16,
}  # fmt: skip


_LATENT = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "kv_lora_rank": 14,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 7,
}


_GLM4 = {"moe_intermediate_size": 20, "n_shared_experts": 2, "num_nextn_predict_layers": 0}


_INDEX = {"q_lora_rank": 18, "index_topk": 6, "index_head_dim": 10, "index_n_heads": 16}
"""With few heads, exact zeros behind the relu make ties."""


_V2 = {"moe_intermediate_size": 20, "n_shared_experts": 2, "first_k_dense_replace": 1, **_LATENT}


_DELTA = {
    "rms_norm_eps": 0.1,  # a document's first output is a multiple of one value, which the norm after it takes away
    "head_dim": 16, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 9, "linear_value_head_dim": 5,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip


_DELTA_EXPERTS = {
    "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28, "num_experts": 5, "num_experts_per_tok": 2,
}  # fmt: skip


_MAMBA = {
    "rms_norm_eps": 0.1, "head_dim": None, "mamba_n_heads": 10, "mamba_d_head": 8, "mamba_n_groups": 2,
    "mamba_d_state": 6, "mamba_chunk_size": 7, "num_attention_heads": 2,
}  # fmt: skip


_GRANITE_HYBRID = {
    **_MAMBA, **FACTORS, "mamba_n_groups": 1, "shared_intermediate_size": 44, "position_embedding_type": None,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}  # fmt: skip


_FALCON_H1 = {
    **_MAMBA, "mamba_n_heads": 6, "mamba_d_head": 5, "mamba_d_ssm": 30, "head_dim": 10, "num_attention_heads": 6,
    "embedding_multiplier": 5.7, "lm_head_multiplier": 0.6, "key_multiplier": 0.7, "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.45, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.8,
    "mlp_multipliers": [0.6, 1.7], "ssm_multipliers": [1.4, 0.9, 0.7, 1.2, 0.35],
}  # fmt: skip
"""Two groups of three heads each, and three queries for a key."""


_NEMOTRON = {
    "layer_norm_epsilon": 0.1, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "mamba_num_heads": 6, "mamba_head_dim": 5, "n_groups": 2, "ssm_state_size": 7, "chunk_size": 6,
    "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_group": 3, "topk_group": 2,
    "moe_shared_expert_intermediate_size": 28, "routed_scaling_factor": 2.5, "time_step_min": 0.4,
}  # fmt: skip


_SHORT_CONV = {
    "head_dim": None, "conv_L_cache": 3, "norm_eps": 0.1, "layer_types": ["conv", "full_attention", "conv", "conv"]
}  # fmt: skip


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": _LLAMA3}),
    "llama fused": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "mistral without window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"head_dim": None, "tie_word_embeddings": True}),
    "qwen2 with windows": (
        "Qwen2",
        {"head_dim": None, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3", {}),
    "granite": ("Granite", {**FACTORS, "tie_word_embeddings": True, "head_dim": None}),
    "minicpm": ("Granite", {"head_dim": None}),
    "smollm3": ("SmolLM3", {"head_dim": None, "no_rope_layer_interval": 2}),
    "smollm3 with windows": (
        "SmolLM3",
        {"head_dim": None, "no_rope_layer_interval": 4, "use_sliding_window": True, "sliding_window": 6},
    ),
    "olmo2": ("Olmo2", {"head_dim": None, "tie_word_embeddings": True}),
    "olmo2 one head each": ("Olmo2", {"head_dim": None, "num_key_value_heads": 4, "attention_bias": True}),
    "olmo3": (
        "Olmo3",
        {
            "head_dim": None,
            "sliding_window": 7,
            "rope_parameters": {
                "full_attention": {**_YARN, "truncate": True},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "seed oss": ("SeedOss", {"residual_dropout": 0.0, "attention_dropout": 0.0}),
    "exaone4": ("Exaone4", {"head_dim": None, "sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "exaone4 with windows": ("Exaone4", {"head_dim": None, "sliding_window": 7, "sliding_window_pattern": 2}),
    "phi3": ("Phi3", {"head_dim": None, "sliding_window": 11}),
    "phi3 longrope": (
        "Phi3",
        {"head_dim": None, "hidden_size": 48, "rope_parameters": _LONGROPE, "original_max_position_embeddings": 40},
    ),
    "gemma2": ("Gemma2", {**_GEMMA, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3", {**_GEMMA, "sliding_window_pattern": 2, "rope_parameters": _GEMMA3_ROPES}),
    "mixtral": ("Mixtral", {"sliding_window": 9, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2 moe": (
        "Qwen2Moe",
        {
            "head_dim": None,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 28,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3 moe": (
        "Qwen3Moe",
        {
            "moe_intermediate_size": 20,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
        },
    ),
    "olmoe": ("Olmoe", {"head_dim": None, "num_experts": 5, "num_experts_per_tok": 2}),
    "glm4 moe": (
        "Glm4Moe",
        {
            **_GLM4,
            "head_dim": 8,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 9,
            "num_experts_per_tok": 4,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
        },
    ),
    "glm4 moe without groups": (
        "Glm4Moe",
        {
            **_GLM4,
            "head_dim": 12,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "first_k_dense_replace": 2,
            "n_shared_experts": 1,
        },
    ),
    "gpt oss": (
        "GptOss",
        {
            "sliding_window": 7,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            **_CLAMP,
            "head_dim": 8,
            "rope_parameters": _YARN,
            "intermediate_size": 28,
        },
    ),
    "deepseek v3": (
        "DeepseekV3",
        {
            **_GLM4,
            **_LATENT,
            "q_lora_rank": 18,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "attention_bias": True,
        },
    ),
    "deepseek v3 yarn": (
        "DeepseekV3",
        {
            **_GLM4,
            **_LATENT,
            "q_lora_rank": None,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 2,
            "rope_interleave": False,
            "rope_parameters": {**_YARN, "truncate": True, "mscale": 0.7, "mscale_all_dim": 1.3},
        },
    ),
    "glm4 moe lite": (
        "Glm4MoeLite",
        {
            **_GLM4,
            **_LATENT,
            "q_lora_rank": 18,
            "v_head_dim": 9,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        },
    ),
    "deepseek v32": (
        "DeepseekV32",
        {
            **_GLM4,
            **_LATENT,
            **_INDEX,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
        },
    ),
    "glm moe dsa": (
        "GlmMoeDsa",
        {**_GLM4, **_LATENT, **_INDEX, "n_routed_experts": 5, "num_experts_per_tok": 2, "first_k_dense_replace": 2},
    ),
    "minimax m2": (
        "MiniMaxM2",
        {
            "head_dim": 12,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.5},
        },
    ),
    "deepseek v2": (
        "DeepseekV2",
        {
            **_V2,
            "q_lora_rank": 18,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "attention_bias": True,
            "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
        },
    ),
    "deepseek v2 greedy": (
        "DeepseekV2",
        {**_V2, "q_lora_rank": None, "n_routed_experts": 5, "num_experts_per_tok": 2},
    ),
    "qwen3 next": ("Qwen3Next", {**_DELTA, **_DELTA_EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3.5": ("Qwen3_5", {**_DELTA, "linear_num_key_heads": 2, "linear_num_value_heads": 2}),
    "qwen3.5 moe": (
        "Qwen3_5Moe",
        {**_DELTA, **_DELTA_EXPERTS, "layer_types": ["full_attention", *["linear_attention"] * 3]},
    ),
    "bamba": ("Bamba", {**_MAMBA, **_ONE_GROUP, "attn_layer_indices": [1]}),
    "falcon h1": ("FalconH1", _FALCON_H1),
    "falcon h1 with norms": (
        "FalconH1",
        {
            **_FALCON_H1,
            "mamba_n_groups": 1,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_proj_bias": True,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "granite hybrid": ("GraniteMoeHybrid", {**_GRANITE_HYBRID, "num_local_experts": 0}),
    "granite hybrid moe": (
        "GraniteMoeHybrid",
        {
            **_GRANITE_HYBRID,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 20,
            "position_embedding_type": "rope",
        },
    ),
    "olmo hybrid": (
        "OlmoHybrid",
        {
            **{key: value for key, value in _DELTA.items() if key != "head_dim"},
            "head_dim": None,
            "linear_num_value_heads": 2,
            "linear_value_head_dim": 9,  # transformers writes the three convolutions as thirds
        },
    ),
    "kimi linear": (
        "KimiLinear",
        {
            **_LATENT,
            "rms_norm_eps": 0.1,
            "linear_head_dim": 5,
            "linear_num_heads": 2,
            "layer_types": _DELTA["layer_types"],
            "moe_intermediate_size": 20,
            "n_shared_experts": 2,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "n_group": 3,
            "topk_group": 2,
        },
    ),
    "lfm2": ("Lfm2", {**_SHORT_CONV, "block_multiple_of": 4, "block_ffn_dim_multiplier": 1.3}),
    "lfm2 with biases": (
        "Lfm2",
        {**_SHORT_CONV, "conv_bias": True, "tie_word_embeddings": False, "block_auto_adjust_ff_dim": False},
    ),
    "nemotron h": ("NemotronH", _NEMOTRON),
    "lfm2 moe": (
        "Lfm2Moe",
        {
            **_SHORT_CONV,
            "moe_intermediate_size": 20,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.7,
        },
    ),
    "gemma4": ("Gemma4", {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4 moe": (
        "Gemma4",
        {**_GEMMA4, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 20},
    ),
    "gemma4 small": ("Gemma4", {**_GEMMA4, **_GEMMA4_SMALL}),
    "gemma4 with values": (
        "Gemma4",
        {**_GEMMA4, "final_logit_softcapping": 2.0, "tie_word_embeddings": False},
    ),
    "gemma3 without windows": ("Gemma3", {**_GEMMA, "layer_types": ["full_attention"] * 4}),
    "arcee": ("Arcee", {"mlp_bias": True, "attention_bias": True}),
    "ernie 4.5": ("Ernie4_5", {"use_bias": True, "rope_parameters": _LLAMA3, "tie_word_embeddings": False}),
    "ernie 4.5 moe": (
        "Ernie4_5_Moe",
        {
            "head_dim": None,
            "hidden_size": 48,
            "moe_intermediate_size": 20,
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_num_shared_experts": 1,
            "moe_layer_interval": 2,
            "moe_norm_min": 0.6,
            "tie_word_embeddings": False,
        },
    ),
    "hunyuan": (
        "HunYuanDenseV1",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 300.0, "alpha": 7.0, "factor": 1.0}},
    ),
    "hunyuan moe": ("HunYuanMoEV1", {"intermediate_size": 24, "num_experts": 5, "moe_topk": [2] * 4}),
    "ministral3": ("Ministral3", {"rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.7}}),
    "nemotron h latent": ("NemotronH", {**_NEMOTRON, "moe_latent_size": 24}),
    "glm": ("Glm", {"head_dim": 12}),
    "glm4": ("Glm4", {"head_dim": 12, "attention_bias": False, "rope_parameters": {**_YARN, "truncate": True}}),
}
"""Model -> prefix of transformers' classes, and what its config has beside the common sizes."""


ROUTED = (
    "mixtral",
    "qwen2 moe",
    "qwen3 moe",
    "olmoe",
    "glm4 moe",
    "glm4 moe without groups",
    "gpt oss",
    "deepseek v3",
    "deepseek v3 yarn",
    "glm4 moe lite",
    "minimax m2",
    "deepseek v32",
    "glm moe dsa",
    "deepseek v2",
    "deepseek v2 greedy",
    "lfm2 moe",
    "qwen3 next",
    "qwen3.5 moe",
    "granite hybrid moe",
    "nemotron h",
    "gemma4 moe",
    "kimi linear",
    "ernie 4.5 moe",
    "hunyuan moe",
    "nemotron h latent",
)
"""Those with experts that a router chooses."""
