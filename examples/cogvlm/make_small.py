"""A tiny CogVLM2 with drawn weights, and images with questions.

    python make_small.py --out FOLDER

writes FOLDER/model as the released folder has it, and the images and records of `examples/minicpm_v`, which have one
image each, as CogVLM takes them. Needs the repository's root in PYTHONPATH, as run.sh sets it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from examples.drawn_models import (
    SENTENCEPIECE_VOCABULARY,
    Shape,
    linear,
    norm,
    write_as_asked,
    write_sentencepiece,
    write_weights,
)
from examples.minicpm_v.make_small import write_records

ADDED = ("<|pad|>",)
HIDDEN, LAYERS, HEADS, KEY_HEADS, FFN = 96, 2, 6, 2, 192
WIDTH, BLOCKS, TOWER_FFN, PATCH, SIDE = 64, 2, 128, 14, 4
CONFIG = {
    "architectures": ["CogVLMForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_multi_query_heads": KEY_HEADS,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "template_version": "chat",
    "tie_word_embeddings": False,
    "vocab_size": SENTENCEPIECE_VOCABULARY + len(ADDED),
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": SENTENCEPIECE_VOCABULARY,
    "torch_dtype": "float32",
    "vision_config": {
        "dropout_prob": 0.0,
        "hidden_act": "gelu",
        "in_channels": 3,
        "num_hidden_layers": BLOCKS,
        "hidden_size": WIDTH,
        "patch_size": PATCH,
        "num_heads": 4,
        "intermediate_size": TOWER_FFN,
        "layer_norm_eps": 1e-6,
        "num_positions": SIDE**2 + 1,
        "image_size": SIDE * PATCH,
    },
}


def shapes() -> Iterator[Shape]:
    """Every tensor of the checkpoint but the rotary tables, by the name that the released one has for it."""
    vocabulary = SENTENCEPIECE_VOCABULARY + len(ADDED)
    rows = HIDDEN + 2 * KEY_HEADS * (HIDDEN // HEADS)
    yield from (("model.embed_tokens.weight", (vocabulary, HIDDEN)), ("lm_head.weight", (vocabulary, HIDDEN)))
    yield "model.norm.weight", (HIDDEN,)
    for layer in (f"model.layers.{number}." for number in range(LAYERS)):
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}{name}.weight", (HIDDEN,)
        for expert in ("vision", "language"):
            yield f"{layer}self_attn.{expert}_expert_query_key_value.weight", (rows, HIDDEN)
            yield f"{layer}self_attn.{expert}_expert_dense.weight", (HIDDEN, HIDDEN)
            for name in ("gate", "up"):
                yield f"{layer}mlp.{expert}_mlp.{name}_proj.weight", (FFN, HIDDEN)
            yield f"{layer}mlp.{expert}_mlp.down_proj.weight", (HIDDEN, FFN)
        yield f"{layer}self_attn.vision_expert_query_key_value.bias", (rows,)
    yield from ((f"model.vision.{end}", (1, 1, HIDDEN)) for end in ("boi", "eoi"))
    patches = "model.vision.patch_embedding."
    yield f"{patches}cls_embedding", (1, WIDTH)
    yield f"{patches}position_embedding.weight", (SIDE**2 + 1, WIDTH)
    yield from ((f"{patches}proj.weight", (WIDTH, 3, PATCH, PATCH)), (f"{patches}proj.bias", (WIDTH,)))
    for block in (f"model.vision.transformer.layers.{number}." for number in range(BLOCKS)):
        yield from norm(f"{block}input_layernorm", WIDTH)
        yield from norm(f"{block}post_attention_layernorm", WIDTH)
        yield from linear(f"{block}attention.query_key_value", 3 * WIDTH, WIDTH)
        yield from linear(f"{block}attention.dense", WIDTH, WIDTH)
        yield from linear(f"{block}mlp.fc1", TOWER_FFN, WIDTH)
        yield from linear(f"{block}mlp.fc2", WIDTH, TOWER_FFN)
    yield from (("model.vision.conv.weight", (WIDTH, WIDTH, 2, 2)), ("model.vision.conv.bias", (WIDTH,)))
    projector = "model.vision.linear_proj."
    yield f"{projector}linear_proj.weight", (HIDDEN, WIDTH)
    yield from norm(f"{projector}norm1", HIDDEN)
    yield f"{projector}gate_proj.weight", (FFN, HIDDEN)
    yield f"{projector}dense_h_to_4h.weight", (FFN, HIDDEN)
    yield f"{projector}dense_4h_to_h.weight", (HIDDEN, FFN)


def write(out: Path) -> None:
    """Writes images, records and model."""
    texts = write_records(out, random.Random(0))
    write_weights(out / "model", shapes(), CONFIG)
    write_sentencepiece(out / "model", [*texts, "Question: Answer:"], ADDED)


if __name__ == "__main__":
    write_as_asked(write, "a tiny CogVLM2, and images with questions")
