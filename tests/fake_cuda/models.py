"""Small models: keys of config.json that differ from the small Llama's."""

from __future__ import annotations

from typing import Any

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512,
    "vocab_size": 1000, "num_attention_heads": 8, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": False, "max_position_embeddings": 4096,
}  # fmt: skip
LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_hidden_layers": 32,
}  # fmt: skip
HYBRID: dict[str, Any] = {
    "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "head_dim": 32, "num_hidden_layers": 4,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1,
}  # fmt: skip
"""Three layers of gated delta nets and one of attention, each with experts."""
GEMMA: dict[str, Any] = {
    "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "head_dim": 32, "sliding_window": 32,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 32,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
}  # fmt: skip
IMAGES: dict[str, Any] = {
    "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "mm_tokens_per_image": 9,
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "num_hidden_layers": 2,
        "sliding_window": 32, "sliding_window_pattern": 2,
    },
    "vision_config": {
        "model_type": "siglip_vision_model", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "patch_size": 2, "image_size": 12,
    },
}  # fmt: skip
"""A layer whose window hides something, and one without; tokens of images see their whole image in both."""
_TEXT: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000, "num_attention_heads": 8,
    "num_key_value_heads": 4, "num_hidden_layers": 2,
}  # fmt: skip
_TOWER: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 2,
}  # fmt: skip
LLAVA: dict[str, Any] = {
    "model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "text_config": _TEXT,
    "vision_config": {"model_type": "clip_vision_model", "image_size": 6, **_TOWER},
}  # fmt: skip
ONEVISION: dict[str, Any] = {
    "model_type": "llava_onevision", "architectures": ["LlavaOnevisionForConditionalGeneration"], "text_config": _TEXT,
    "vision_config": {"model_type": "siglip_vision_model", "image_size": 4, **_TOWER},
}  # fmt: skip
NEXT: dict[str, Any] = {
    "model_type": "llava_next", "architectures": ["LlavaNextForConditionalGeneration"], "text_config": _TEXT,
    "vision_config": {"model_type": "clip_vision_model", "image_size": 4, **_TOWER},
    "image_grid_pinpoints": [[4, 4], [4, 8], [8, 8]],
}  # fmt: skip
INTERNVL: dict[str, Any] = {
    "model_type": "internvl", "architectures": ["InternVLForConditionalGeneration"], "text_config": _TEXT,
    "vision_config": {"model_type": "internvl_vision", "image_size": 8, **_TOWER},
}  # fmt: skip
_GRID_TOWER: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "depth": 3, "num_heads": 4, "patch_size": 80, "spatial_merge_size": 2,
    "out_hidden_size": 256,
}  # fmt: skip
_BY_GRID: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000, "num_attention_heads": 8,
    "num_key_value_heads": 4, "num_hidden_layers": 4, "max_position_embeddings": 4096,
}  # fmt: skip
QWEN2_5_VL: dict[str, Any] = {
    "model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "text_config": {
        "model_type": "qwen2_5_vl_text", **_BY_GRID, "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
    },
    "vision_config": {**_GRID_TOWER, "window_size": 320, "fullatt_block_indexes": [1]},
}  # fmt: skip
QWEN3_VL: dict[str, Any] = {
    "model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"],
    "text_config": {
        "model_type": "qwen3_vl_text", **_BY_GRID, "head_dim": 32, "rope_scaling": {"mrope_section": [6, 5, 5]},
    },
    "vision_config": {**_GRID_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1, 2]},
}  # fmt: skip
"""An image of 6 x 8 patches is 12 tokens; of Qwen3-VL's features for three layers one crosses to the second stage."""
SHARED_EXPERT: dict[str, Any] = {
    "model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "head_dim": 32, "intermediate_size": 64,
    "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 32, "attention_bias": True,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 8,
    "moe_intermediate_size": 64, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "q_lora_rank": 64,
    "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "num_nextn_predict_layers": 0,
}  # fmt: skip
QWEN: dict[str, Any] = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 32}
MIXTURE: dict[str, Any] = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 32, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 128,
}  # fmt: skip
COGVLM: dict[str, Any] = {
    "model_type": "cogvlm", "architectures": ["CogVLMForCausalLM"],
    "vision_config": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_heads": 4, "patch_size": 2,
        "image_size": 6, "num_positions": 10,
    },
}  # fmt: skip
COGVLM2: dict[str, Any] = {
    **COGVLM, "model_type": "cogvlm2", "num_multi_query_heads": 4,
    "vision_config": {**COGVLM["vision_config"], "image_size": 8, "num_positions": 17},
}  # fmt: skip
COGAGENT: dict[str, Any] = {
    **COGVLM, "model_type": "cogagent", "architectures": ["CogAgentForCausalLM"], "cross_hidden_size": 64,
    "cross_compute_hidden_size": 128, "cross_image_size": 12,
    "cross_vision_config": {"layers_run": 2, "num_heads": 4, "mlp_hidden": 96, "patch_size": 2, "pt_hw_seq_len": 4},
}  # fmt: skip
"""Its layers attend to a second tower's features of the same images."""
MINICPM_V: dict[str, Any] = {
    "model_type": "minicpmv", "architectures": ["MiniCPMV"], "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 64,
    "max_slice_nums": 9, "patch_size": 2, "image_size": 8, "scale_resolution": 8, "query_num": 4,
    "drop_vision_last_layer": True, "vision_encoder": "a small one",
    "tower_config": {
        "embed_dim": 64, "depth_in_timm": 3, "num_heads": 4, "mlp_hidden": 96, "patch_size": 2, "pos_grid": [5, 5],
    },
}  # fmt: skip
MINICPM_V_2_6: dict[str, Any] = {
    "model_type": "minicpmv", "architectures": ["MiniCPMV"], "version": 2.6, "patch_size": 2, "image_size": 8,
    "query_num": 4, "drop_vision_last_layer": False, "slice_config": {"max_slice_nums": 9, "scale_resolution": 8},
    "vision_config": {"model_type": "siglip", "image_size": 18, **_TOWER},
}  # fmt: skip
OMNILMM: dict[str, Any] = {
    "model_type": "omnilmm", "architectures": ["OmniLMMForCausalLM"], "image_size": 8, "num_query": 4,
    "mm_hidden_size": 64, "mm_vision_tower": "a small one",
    "tower_config": {
        "embed_dim": 64, "depth_in_timm": 3, "num_heads": 4, "mlp_hidden": 96, "patch_size": 2, "pos_grid": [3, 3],
        "class_token": True, "use_post_norm": True,
    },
}  # fmt: skip
