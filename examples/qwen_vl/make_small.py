"""A tiny Qwen2.5-VL with drawn weights, and images with questions.

    python make_small.py --out FOLDER

writes FOLDER/model (config.json, model.safetensors, tokenizer and preprocessor_config.json, as the released folder has
them), and the images and records of `examples/minicpm_v`. Needs the repository's root in PYTHONPATH, as run.sh sets
it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from examples.drawn_models import (
    BYTE_LEVEL_VOCABULARY,
    QWEN_VOCABULARY,
    Shape,
    linear,
    qwen_token,
    write_as_asked,
    write_byte_level,
    write_json,
    write_weights,
)
from examples.minicpm_v.make_small import write_records

HIDDEN, LAYERS, HEADS, KEY_HEADS, FFN = 96, 2, 6, 2, 192
WIDTH, BLOCKS, TOWER_FFN, PATCH, MERGE = 64, 2, 128, 14, 2
CONFIG = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "max_window_layers": LAYERS,
    "use_sliding_window": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "tie_word_embeddings": False,
    "vocab_size": QWEN_VOCABULARY,
    "torch_dtype": "float32",
    "bos_token_id": BYTE_LEVEL_VOCABULARY,
    "eos_token_id": qwen_token("<|im_end|>"),
    "vision_start_token_id": qwen_token("<|vision_start|>"),
    "vision_end_token_id": qwen_token("<|vision_end|>"),
    "image_token_id": qwen_token("<|image_pad|>"),
    "video_token_id": qwen_token("<|video_pad|>"),
    "vision_config": {
        "depth": BLOCKS,
        "hidden_act": "silu",
        "hidden_size": WIDTH,
        "intermediate_size": TOWER_FFN,
        "num_heads": 4,
        "in_chans": 3,
        "out_hidden_size": HIDDEN,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "window_size": 56,
        "fullatt_block_indexes": [BLOCKS - 1],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 56 * 56,
    "max_pixels": 112 * 112,
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def shapes() -> Iterator[Shape]:
    """Every tensor of the checkpoint, by the name that the released one has for it."""
    yield from ((f"{name}.weight", (QWEN_VOCABULARY, HIDDEN)) for name in ("model.embed_tokens", "lm_head"))
    yield "model.norm.weight", (HIDDEN,)
    head = HIDDEN // HEADS
    for layer in (f"model.layers.{number}." for number in range(LAYERS)):
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}{name}.weight", (HIDDEN,)
        for name, heads in (("q", HEADS), ("k", KEY_HEADS), ("v", KEY_HEADS)):
            yield from linear(f"{layer}self_attn.{name}_proj", heads * head, HIDDEN)
        yield f"{layer}self_attn.o_proj.weight", (HIDDEN, HIDDEN)
        for name in ("gate", "up"):
            yield f"{layer}mlp.{name}_proj.weight", (FFN, HIDDEN)
        yield f"{layer}mlp.down_proj.weight", (HIDDEN, FFN)
    yield "visual.patch_embed.proj.weight", (WIDTH, 3, 2, PATCH, PATCH)
    for block in (f"visual.blocks.{number}." for number in range(BLOCKS)):
        yield from ((f"{block}norm1.weight", (WIDTH,)), (f"{block}norm2.weight", (WIDTH,)))
        yield from linear(f"{block}attn.qkv", 3 * WIDTH, WIDTH)
        yield from linear(f"{block}attn.proj", WIDTH, WIDTH)
        yield from linear(f"{block}mlp.gate_proj", TOWER_FFN, WIDTH)
        yield from linear(f"{block}mlp.up_proj", TOWER_FFN, WIDTH)
        yield from linear(f"{block}mlp.down_proj", WIDTH, TOWER_FFN)
    yield "visual.merger.ln_q.weight", (WIDTH,)
    yield from linear("visual.merger.mlp.0", WIDTH * MERGE**2, WIDTH * MERGE**2)
    yield from linear("visual.merger.mlp.2", HIDDEN, WIDTH * MERGE**2)


def write(out: Path) -> None:
    """Writes images, records and model."""
    texts, model = write_records(out, random.Random(0)), out / "model"
    write_weights(model, shapes(), CONFIG)
    write_json(model / "preprocessor_config.json", PROCESSOR)
    write_byte_level(model, texts)


if __name__ == "__main__":
    write_as_asked(write, "a tiny Qwen2.5-VL, and images with questions")
