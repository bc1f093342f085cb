"""What the `vision_config` of a config.json leaves out where it is what transformers' class has. No tensors.

Some releases of transformers wrote only what differs from the classes' defaults, so that fine-tuned checkpoints lack
sizes which those they came from had.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CLIP, SIGLIP, INTERNVL = "clip_vision_model", "siglip_vision_model", "internvl_vision"
QWEN2_5_VL, QWEN3_VL = "qwen2_5_vl_vision", "qwen3_vl_vision"

TOWER_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    CLIP: {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "patch_size": 32, "image_size": 224, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
    },
    SIGLIP: {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "patch_size": 16, "image_size": 224, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
    },
    INTERNVL: {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "patch_size": 14, "image_size": 448, "hidden_act": "gelu", "layer_norm_eps": 1e-6,
    },
    QWEN2_5_VL: {
        "hidden_size": 3584, "intermediate_size": 3420, "depth": 32, "num_heads": 16, "patch_size": 14,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112, "out_hidden_size": 3584,
        "hidden_act": "silu", "in_channels": 3, "fullatt_block_indexes": (7, 15, 23, 31),
    },
    QWEN3_VL: {
        "hidden_size": 1152, "intermediate_size": 4304, "depth": 27, "num_heads": 16, "patch_size": 16,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304, "out_hidden_size": 3584,
        "hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "deepstack_visual_indexes": (8, 16, 24),
    },
}  # fmt: skip
"""By `model_type` of the tower."""

MODEL_TOWERS: Mapping[str, str] = {
    "gemma3": SIGLIP,
    "internvl": INTERNVL,
    "llava": CLIP,
    "llava_next": CLIP,
    "llava_onevision": SIGLIP,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen3_vl": QWEN3_VL,
}
"""By `model_type` of the whole: the tower of a `vision_config` that does not say."""


def whole_tower(hf: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns `vision_config` with what it leaves out, its `model_type` among that; None where there is none."""
    given = hf.get("vision_config")
    if not isinstance(given, Mapping):
        return None
    usual = MODEL_TOWERS[str(hf["model_type"])]
    kind = str(given.get("model_type", usual))
    return {**TOWER_DEFAULTS.get(kind, TOWER_DEFAULTS[usual]), **given, "model_type": kind}
