"""What the `vision_config` of a config.json leaves out where it is what transformers' class has. No tensors.

Some releases of transformers wrote only what differs from the classes' defaults, so that fine-tuned checkpoints lack
sizes which those they came from had.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from engine.errors import UserError

CLIP, SIGLIP, INTERNVL = "clip_vision_model", "siglip_vision_model", "internvl_vision"
QWEN2_5_VL, QWEN3_VL = "qwen2_5_vl_vision", "qwen3_vl_vision"
QWEN3_5, QWEN3_5_MOE = "qwen3_5_vision", "qwen3_5_moe_vision"
MINICPM_V4_6, MINICPM_V4_7 = "minicpmv4_6_vision", "minicpmv4_7_vision"

_QWEN3_5 = {
    "hidden_size": 1152, "intermediate_size": 4304, "depth": 27, "num_heads": 16, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304, "out_hidden_size": 3584,
    "hidden_act": "gelu_pytorch_tanh", "in_channels": 3,
}  # fmt: skip
_MINICPM_V4_6 = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "patch_size": 16, "image_size": 224, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
    "window_kernel_size": (2, 2),
}  # fmt: skip

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
    QWEN3_5: _QWEN3_5,
    QWEN3_5_MOE: _QWEN3_5,
    MINICPM_V4_6: _MINICPM_V4_6,
    MINICPM_V4_7: _MINICPM_V4_6,
}  # fmt: skip
"""By `model_type` of the tower."""

MODEL_TOWERS: Mapping[str, str] = {
    "gemma3": SIGLIP,
    "internvl": INTERNVL,
    "llava": CLIP,
    "llava_next": CLIP,
    "llava_onevision": SIGLIP,
    "minicpmv4_6": MINICPM_V4_6,
    "minicpmv4_7": MINICPM_V4_7,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5_MOE,
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


class MergingTower(NamedTuple):
    """The tower of a MiniCPM-V 4.6 or 4.7.

    Args:
        vision: `vision_config`, which leaves nothing out.
        window_behind: the layer behind which windows of patches are merged; None where they are not.
    """

    vision: dict[str, Any]
    window_behind: int | None


DOWNSAMPLE_MODES = ("16x", "4x")
_WINDOW_BEHIND = 6


def merging_tower(hf: Mapping[str, Any]) -> MergingTower | None:
    """Returns the tower of a MiniCPM-V 4.6 or 4.7; None where there is none.

    Raises:
        UserError: `downsample_mode` or `insert_layer_id` is something else than it may be.
    """
    if (vision := whole_tower(hf)) is None:
        return None
    mode, behind = hf.get("downsample_mode", "16x"), hf.get("insert_layer_id", _WINDOW_BEHIND)
    if mode not in DOWNSAMPLE_MODES:
        raise UserError(
            f"config.json has downsample_mode {mode!r}, but {' or '.join(DOWNSAMPLE_MODES)} is expected: correct it or "
            "copy it again."
        )
    if type(behind) is not int:
        raise UserError(
            f"config.json has insert_layer_id {behind!r}, but the number of one of the tower's layers is expected: "
            "correct it or copy it again."
        )
    return MergingTower(vision, behind if mode == "16x" else None)
