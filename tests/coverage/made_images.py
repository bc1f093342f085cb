"""What configs of models of images and text have in place of transformers' defaults, where those do not run."""

from __future__ import annotations

import json
from typing import Any

from tests.coverage import made

_MINICPM = {"image_token_id": 248056, "video_token_id": 248057}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_QWEN2 = {"rope_parameters": {**_ROPE, "mrope_section": [16, 24, 24]}}
_GLM = {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}}}
_GLM_128 = {"text_config": {**_GLM["text_config"], "head_dim": 128}}
MORE: dict[str, dict[str, Any]] = {
    "aria": {"vision_config": {"image_size": 490, "patch_size": 14}},
    "aya_vision": {"vision_config": {"num_attention_heads": 16}},
    "blip-2": {"image_token_index": 50265},
    "chameleon": {"vocabulary_map": {"<image>": 8711}},
    "cohere_compass": {"text_config": made.MORE["cohere_compass_text"], "vision_config": {"out_hidden_size": 8192}},
    "cosmos3_omni": {"vision_config": {"out_hidden_size": 4096}},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [22, 22, 20]}}},
    "deepseek_ocr2": {
        "text_config": {
            "hidden_size": 1280,
            "mlp_layer_types": ["dense", *["sparse"] * 31],
            "num_experts_per_tok": 6,
        },
        "vision_config": {"encoder_config": {"hidden_size": 896}},
    },
    "diffusion_gemma": {"text_config": {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}},
    "exaone4_5": {"vision_config": {"out_hidden_size": 4096}},
    "gemma3": {"vision_config": {"image_size": 896, "patch_size": 14}},
    "gemma4": {"vision_config": {}},
    "gemma4_unified": {"vision_config": {}},
    **dict.fromkeys(("glm46v", "glm4v", "glmga"), _GLM),
    **dict.fromkeys(("glm4v_moe", "glm_ocr"), _GLM_128),
    "granite4_vision": {
        "deepstack_layer_map": [[-2, 0], [-1, 1]],
        "downsample_rate": "4/8",
        "image_grid_pinpoints": [[384, 768], [768, 384], [768, 768]],
        "vision_config": {"image_size": 384, "patch_size": 16},
    },
    "hunyuan_vl": {"text_config": {"head_dim": 128, "rope_parameters": {**_ROPE, "mrope_section": [16, 16, 16, 16]}}},
    "llama4": {"vision_config": {"hidden_size": 1408, "vision_output_dim": 4096}},
    **dict.fromkeys(("minicpm_ocr", "minicpmv4_6", "minicpmv4_7"), _MINICPM),
    "nemotron_h_omni": {"image_token_id": 18},
    "paddleocr_vl": {"text_config": _QWEN2},
    "qwen2_5_omni_thinker": {"text_config": _QWEN2},
    "qwen2_5_vl": {"text_config": _QWEN2, "vision_config": {"out_hidden_size": 8192}},
    "qwen2_vl": {"text_config": _QWEN2, "vision_config": {"hidden_size": 8192}},
    "qwen4_exp": made.MORE["qwen4_exp"],
    "shieldgemma2": {"vision_config": {"image_size": 896, "patch_size": 14}},
    "step3p7": {"text_config": {"sliding_window": 512}},
}
"""By type, keys and their values; a table is put into the one of the default."""


def image_config_of(model_type: str) -> dict[str, Any]:
    """Returns a `config.json` of a type that transformers has, whose parts fit each other."""
    from transformers import CONFIG_MAPPING

    record = CONFIG_MAPPING[model_type]()
    found = json.loads(json.dumps(record.to_dict(), default=str))
    return {**_with(found, MORE.get(model_type, {})), "model_type": model_type}


def _with(config: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    found = dict(config)
    for key, value in more.items():
        inside = config.get(key)
        found[key] = _with(inside, value) if isinstance(inside, dict) and isinstance(value, dict) else value
    return found
