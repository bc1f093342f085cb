"""A tiny MiniCPM-V 4.6 with drawn weights, and images with questions.

    python make_small.py --out FOLDER

writes FOLDER/model (config.json, model.safetensors, tokenizer and preprocessor_config.json, as the released folder has
them), and the images and records of `examples/minicpm_v`. The language model has the sizes of `examples/qwen3_5`. Needs
the repository's root in PYTHONPATH, as run.sh sets it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from examples.drawn_models import (
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
from examples.qwen3_5.make_small import HIDDEN, TEXT, ZEROS, text_shapes

WIDTH, LAYERS, FFN, PATCH, SIDE = 64, 3, 128, 14, 8
MARKERS = ("<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>")
CONFIG = {
    "architectures": ["MiniCPMV4_6ForConditionalGeneration"],
    "model_type": "minicpmv4_6",
    "tie_word_embeddings": False,
    "dtype": "float32",
    "downsample_mode": "16x",
    "insert_layer_id": 1,
    "image_token_id": qwen_token("<|image_pad|>"),
    "video_token_id": qwen_token("<|video_pad|>"),
    "text_config": TEXT,
    "vision_config": {
        "model_type": "minicpmv4_6_vision",
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": WIDTH,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "patch_size": PATCH,
        "image_size": SIDE * PATCH,
    },
}
PROCESSOR = {
    "image_processor_type": "MiniCPMV4_6ImageProcessor",
    "scale_resolution": 112,
    "max_slice_nums": 4,
    "patch_size": PATCH,
    "downsample_mode": "16x",
}
"""Images of more than 112 x 112 are cut into tiles."""


def _attention(name: str) -> Iterator[Shape]:
    for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
        yield from linear(f"{name}.{part}", WIDTH, WIDTH)


def shapes() -> Iterator[Shape]:
    """Every tensor of the checkpoint, by the name that the released one has for it."""
    yield from text_shapes()
    tower, wide = "model.vision_tower.", 4 * WIDTH
    yield f"{tower}embeddings.patch_embedding.weight", (WIDTH, 3, PATCH, PATCH)
    yield f"{tower}embeddings.patch_embedding.bias", (WIDTH,)
    yield f"{tower}embeddings.position_embedding.weight", (SIDE**2, WIDTH)
    for layer in (f"{tower}encoder.layers.{number}." for number in range(LAYERS)):
        yield from (*norm(f"{layer}layer_norm1", WIDTH), *norm(f"{layer}layer_norm2", WIDTH))
        yield from _attention(f"{layer}self_attn")
        yield from (*linear(f"{layer}mlp.fc1", FFN, WIDTH), *linear(f"{layer}mlp.fc2", WIDTH, FFN))
    yield from norm(f"{tower}post_layernorm", WIDTH)
    merger = f"{tower}vit_merger."
    yield from _attention(f"{merger}self_attn")
    yield from (*norm(f"{merger}layer_norm1", WIDTH), *norm(f"{merger}pre_norm", wide))
    yield from (*linear(f"{merger}linear_1", 4 * FFN, wide), *linear(f"{merger}linear_2", WIDTH, 4 * FFN))
    merger = "model.merger.mlp.0."
    yield from norm(f"{merger}pre_norm", wide)
    yield from (*linear(f"{merger}linear_1", wide, wide), *linear(f"{merger}linear_2", HIDDEN, wide))


def write(out: Path) -> None:
    """Writes images, records and model."""
    texts, model = write_records(out, random.Random(0)), out / "model"
    write_weights(model, shapes(), CONFIG, zeros=ZEROS)
    write_json(model / "preprocessor_config.json", PROCESSOR)
    write_byte_level(model, texts, added=MARKERS, image="<|image_pad|>\n")


if __name__ == "__main__":
    write_as_asked(write, "a tiny MiniCPM-V 4.6, and images with questions")
