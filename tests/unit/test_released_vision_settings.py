"""Settings as released folders of vision-language models have them, and as fine-tuned ones do: read, and as many tokens
and the same pixels for an image as by transformers' processors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.auto.image_processing_auto import AutoImageProcessor  # elsewhere it asks for torchvision

from engine.data.tokenizer import load_tokenizer
from engine.models.families import family_of
from engine.vision.data.families import read_vision_family
from engine.vision.data.family import Conversation, Turn
from engine.vision.layers.fronts import ImageTower
from tests.support.sweeps import portion
from tests.unit.test_vision_data_processors import KINDS, NESTED, processor_of, written

CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
SWITCHES = {"do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "resample": 3}
SQUARE_336 = {
    **CLIP, **SWITCHES, "crop_size": {"height": 336, "width": 336}, "do_center_crop": True,
    "size": {"shortest_edge": 336},
}  # fmt: skip
QWEN = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, **CLIP}
LIMITS = {"min_pixels": 3136, "max_pixels": 12845056}
PINPOINTS = [[384 * down, 384 * across] for down in range(1, 7) for across in range(1, 7)]
NEXT_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
VICUNA = {"model_type": "llama", "vocab_size": 32064, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
CLIP_LARGE = {
    "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "image_size": 336,
    "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768, "vocab_size": 32000,
}  # fmt: skip
SIGLIP_400M = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16,
    "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
QWEN2_7B = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "max_window_layers": 28, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "sliding_window": 32768, "use_sliding_window": False, "tie_word_embeddings": False,
}  # fmt: skip

RELEASED: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "llava": (
        {"text_config": VICUNA, "vision_config": CLIP_LARGE, "vision_feature_layer": -2, "image_token_index": 32000},
        {**SQUARE_336, "image_processor_type": "CLIPImageProcessor"},
        576,
    ),
    "llava_next": (
        {"text_config": VICUNA, "vision_config": CLIP_LARGE, "image_grid_pinpoints": NEXT_PINPOINTS},
        {
            **SQUARE_336, "image_processor_type": "LlavaNextImageProcessor", "aspect_ratio_setting": "anyres",
            "do_pad": True, "image_grid_pinpoints": NEXT_PINPOINTS,
        },
        2340,
    ),
    "llava_onevision": (
        {
            "text_config": {"model_type": "qwen2", **QWEN2_7B, "vocab_size": 152000},
            "vision_config": {**SIGLIP_400M, "image_size": 384, "num_hidden_layers": 26},
            "image_grid_pinpoints": PINPOINTS, "vision_aspect_ratio": "anyres_max_9", "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full", "use_image_newline_parameter": True,
        },
        {
            **HALF, **SWITCHES, "do_pad": True, "image_grid_pinpoints": PINPOINTS,
            "image_processor_type": "LlavaOnevisionImageProcessor", "size": {"height": 384, "width": 384},
        },
        2929,
    ),
    "gemma3": (
        {
            "text_config": {
                "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
            },
            "vision_config": {**SIGLIP_400M, "image_size": 896, "num_hidden_layers": 27}, "mm_tokens_per_image": 256,
        },
        {
            **HALF, **SWITCHES, "do_convert_rgb": None, "do_pan_and_scan": None, "image_seq_length": 256,
            "image_processor_type": "Gemma3ImageProcessor", "pan_and_scan_max_num_crops": None, "resample": 2,
            "pan_and_scan_min_crop_size": None, "pan_and_scan_min_ratio_to_activate": None,
            "size": {"height": 896, "width": 896},
        },
        256,
    ),
    "internvl": (
        {
            "text_config": {
                "model_type": "qwen2", **QWEN2_7B, "vocab_size": 151674,
                "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"},
            },
            "vision_config": {
                "model_type": "internvl_vision", "attention_bias": True, "hidden_size": 1024,
                "image_size": [448, 448], "intermediate_size": 4096, "layer_norm_eps": 1e-6, "norm_type": "layer_norm",
                "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": [14, 14], "use_qk_norm": False,
            },
            "downsample_ratio": 0.5, "image_seq_length": 256, "vision_feature_layer": -1,
        },
        {
            **HALF, **SWITCHES, "crop_size": None, "crop_to_patches": False, "do_center_crop": None,
            "image_processor_type": "GotOcr2ImageProcessorFast", "max_patches": 12, "min_patches": 1,
            "size": {"height": 448, "width": 448},
        },
        13 * 256,
    ),
    "qwen2_5_vl": (
        {
            **QWEN2_7B, "vocab_size": 152064, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            "vision_config": {
                "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
                "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2,
                "spatial_patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
                "tokens_per_second": 2, "temporal_patch_size": 2,
            },
        },
        {**QWEN, **LIMITS, "image_processor_type": "Qwen2VLImageProcessor"},
        23 * 17,
    ),
    "qwen3_vl": (
        {
            "text_config": {
                "model_type": "qwen3_vl_text", "hidden_size": 2560, "intermediate_size": 9728, "head_dim": 128,
                "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "vocab_size": 151936,
                "rope_theta": 5000000, "tie_word_embeddings": True, "max_position_embeddings": 262144,
                "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            },
            "vision_config": {
                "model_type": "qwen3_vl", "deepstack_visual_indexes": [5, 11, 17], "depth": 24, "hidden_size": 1024,
                "hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "intermediate_size": 4096, "num_heads": 16,
                "num_position_embeddings": 2304, "out_hidden_size": 2560, "patch_size": 16, "spatial_merge_size": 2,
                "temporal_patch_size": 2,
            },
            "tie_word_embeddings": True,
        },
        {
            **HALF, "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
            "size": {"longest_edge": 16777216, "shortest_edge": 65536},
            "image_processor_type": "Qwen2VLImageProcessorFast",
        },
        20 * 15,
    ),
}  # fmt: skip
"""config.json without `model_type`, preprocessor_config.json, and the features of an image of 640 x 480."""

TUNED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (
        {"vision_config": {"hidden_size": 1280, "in_chans": 3, "model_type": "qwen2_5_vl", "spatial_patch_size": 14}},
        {**QWEN, **LIMITS, "size": LIMITS, "image_processor_type": "Qwen2_5_VLImageProcessor"},
    )
}
"""What fine-tuning wrote instead with a release of transformers that left out what the classes have."""


@pytest.mark.parametrize(
    ("kind", "tuned"),
    portion([*((kind, False) for kind in RELEASED), *((kind, True) for kind in TUNED)], 3, [("llava", False)]),
)
def test_released_settings(kind: str, tuned: bool, tmp_path: Path) -> None:
    config, settings, count = RELEASED[kind]
    if tuned:
        changes, settings = TUNED[kind]
        config = {**config, **changes}
    tokenizer, _ = written(kind, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **config}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    model, text = family_of(json.loads((tmp_path / "config.json").read_text()))
    tower = model.config_from_hf(text).front(ImageTower)
    vision = None if tower is None else tower.model
    family = read_vision_family(tmp_path, load_tokenizer(tmp_path))
    assert vision is not None and family is not None
    assert family.patch_features == vision.patch_features
    grids = family.grids((640, 480))
    assert sum(map(vision.num_features, grids)) == count
    encoded = family.prompt(Conversation((Turn("user", (0, "Who?")),)), [(640, 480)])
    assert sum(end - start for spans in encoded.spans for start, end in spans) == count

    known = {**settings, "image_processor_type": "Qwen2VLImageProcessor"} if tuned else settings
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(known))
    images = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    options = {"image_seq_length": 256} if kind in ("gemma3", "internvl") else dict(KINDS[kind]["options"])
    options |= {"patch_size": 14} if "patch_size" in options else {}
    options |= {"num_image_tokens": 729, "vision_aspect_ratio": "anyres_max_9"} if kind == "llava_onevision" else {}
    case = {**KINDS[kind], "options": options}
    noise = np.random.default_rng(0).integers(0, 256, (480, 640, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Who?"}]}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    processor = processor_of(kind, tokenizer, images, case)
    found = processor(text=[prompt], images=[[image]] if kind in NESTED else [image], return_tensors="np")
    assert encoded.ids == np.asarray(found["input_ids"])[0].tolist()
    assert family.tiles(image).grids == grids
