"""A tiny Qwen3.5 with drawn weights, and images with questions.

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
    QWEN_VOCABULARY,
    Shape,
    linear,
    norm,
    qwen_token,
    write_as_asked,
    write_byte_level,
    write_json,
    write_weights,
)
from examples.minicpm_v.make_small import write_records

HIDDEN, HEADS, KEY_HEADS, HEAD, FFN = 96, 4, 2, 32, 192
DELTA_HEADS, DELTA_HEAD, TAPS = 4, 16, 4
LAYERS = ("linear_attention", "linear_attention", "linear_attention", "full_attention")
TEXT = {
    "model_type": "qwen3_5_text",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": len(LAYERS),
    "layer_types": list(LAYERS),
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "head_dim": HEAD,
    "linear_conv_kernel_dim": TAPS,
    "linear_key_head_dim": DELTA_HEAD,
    "linear_value_head_dim": DELTA_HEAD,
    "linear_num_key_heads": DELTA_HEADS,
    "linear_num_value_heads": DELTA_HEADS,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
    "vocab_size": QWEN_VOCABULARY,
    "tie_word_embeddings": False,
    "eos_token_id": qwen_token("<|im_end|>"),
}  # fmt: skip
ZEROS = (
    "input_layernorm.weight", "post_attention_layernorm.weight", "language_model.norm.weight", "q_norm.weight",
    "k_norm.weight", "A_log",
)  # fmt: skip
"""Norms that are scaled by 1 + weight, and logarithms of decays."""
WIDTH, BLOCKS, TOWER_FFN, PATCH, MERGE, SIDE = 64, 2, 128, 16, 2, 8
CONFIG = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": False,
    "dtype": "float32",
    "text_config": TEXT,
    "vision_start_token_id": qwen_token("<|vision_start|>"),
    "vision_end_token_id": qwen_token("<|vision_end|>"),
    "image_token_id": qwen_token("<|image_pad|>"),
    "video_token_id": qwen_token("<|video_pad|>"),
    "vision_config": {
        "model_type": "qwen3_5_vision",
        "depth": BLOCKS,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": WIDTH,
        "intermediate_size": TOWER_FFN,
        "num_heads": 4,
        "in_channels": 3,
        "out_hidden_size": HIDDEN,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "num_position_embeddings": SIDE**2,
    },
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 64 * 64, "longest_edge": 128 * 128},
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def text_shapes() -> Iterator[Shape]:
    """Every tensor of the language model."""
    body = "model.language_model."
    yield from ((name, (QWEN_VOCABULARY, HIDDEN)) for name in (f"{body}embed_tokens.weight", "lm_head.weight"))
    yield f"{body}norm.weight", (HIDDEN,)
    width = DELTA_HEADS * DELTA_HEAD
    for number, kind in enumerate(LAYERS):
        layer = f"{body}layers.{number}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}{name}.weight", (HIDDEN,)
        if kind == "full_attention":
            for name, rows in (("q", 2 * HEADS), ("k", KEY_HEADS), ("v", KEY_HEADS)):
                yield f"{layer}self_attn.{name}_proj.weight", (rows * HEAD, HIDDEN)
            yield f"{layer}self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD)
            yield from ((f"{layer}self_attn.{name}_norm.weight", (HEAD,)) for name in ("q", "k"))
        else:
            mixer = f"{layer}linear_attn."
            for name, rows in (("qkv", 3 * width), ("z", width), ("b", DELTA_HEADS), ("a", DELTA_HEADS)):
                yield f"{mixer}in_proj_{name}.weight", (rows, HIDDEN)
            yield f"{mixer}conv1d.weight", (3 * width, 1, TAPS)
            yield from ((f"{mixer}{name}", (DELTA_HEADS,)) for name in ("A_log", "dt_bias"))
            yield f"{mixer}norm.weight", (DELTA_HEAD,)
            yield f"{mixer}out_proj.weight", (HIDDEN, width)
        yield from ((f"{layer}mlp.{name}_proj.weight", (FFN, HIDDEN)) for name in ("gate", "up"))
        yield f"{layer}mlp.down_proj.weight", (HIDDEN, FFN)


def shapes() -> Iterator[Shape]:
    """Every tensor of the checkpoint, by the name that the released one has for it."""
    yield from text_shapes()
    tower = "model.visual."
    yield f"{tower}patch_embed.proj.weight", (WIDTH, 3, 2, PATCH, PATCH)
    yield f"{tower}patch_embed.proj.bias", (WIDTH,)
    yield f"{tower}pos_embed.weight", (SIDE**2, WIDTH)
    for block in (f"{tower}blocks.{number}." for number in range(BLOCKS)):
        yield from (*norm(f"{block}norm1", WIDTH), *norm(f"{block}norm2", WIDTH))
        yield from linear(f"{block}attn.qkv", 3 * WIDTH, WIDTH)
        yield from linear(f"{block}attn.proj", WIDTH, WIDTH)
        yield from linear(f"{block}mlp.linear_fc1", TOWER_FFN, WIDTH)
        yield from linear(f"{block}mlp.linear_fc2", WIDTH, TOWER_FFN)
    yield from norm(f"{tower}merger.norm", WIDTH)
    yield from linear(f"{tower}merger.linear_fc1", WIDTH * MERGE**2, WIDTH * MERGE**2)
    yield from linear(f"{tower}merger.linear_fc2", HIDDEN, WIDTH * MERGE**2)


def write(out: Path) -> None:
    """Writes images, records and model."""
    texts, model = write_records(out, random.Random(0)), out / "model"
    write_weights(model, shapes(), CONFIG, zeros=ZEROS)
    write_json(model / "preprocessor_config.json", PROCESSOR)
    write_byte_level(model, texts)


if __name__ == "__main__":
    write_as_asked(write, "a tiny Qwen3.5, and images with questions")
