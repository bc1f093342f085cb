"""A tiny OmniLMM with drawn weights, and images with questions.

    python make_small.py --out FOLDER

writes FOLDER/model as the released folder has it, and the images and records of `examples/minicpm_v`. Needs the
repository's root in PYTHONPATH, as run.sh sets it.

The released code has the sizes of its tower in itself, so config.json has no keys for them; a model of other sizes
gives them in `tower_config`.
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

ADDED = ("<im_patch>", "<im_start>", "<im_end>", "<box>", "</box>", "<ref>", "</ref>", "<quad>", "</quad>")
SYSTEM = (
    "You are an artificial intelligence assistant, which gives helpful, detailed, and polite answers to the human's "
    "questions. <|system|> <|user|> <|assistant|>"
)
HIDDEN, LAYERS, HEADS, KEY_HEADS, FFN = 128, 2, 4, 2, 256
WIDTH, BLOCKS, TOWER_FFN, PATCH, TABLE_SIDE, IMAGE = 64, 2, 128, 14, 4, 84
QUERIES = 4
CONFIG = {
    "architectures": ["OmniLMMForCausalLM"],
    "model_type": "omnilmm",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "sliding_window": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": SENTENCEPIECE_VOCABULARY + len(ADDED),
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "torch_dtype": "float32",
    "image_size": IMAGE,
    "num_query": QUERIES,
    "mm_hidden_size": WIDTH,
    "mm_use_im_start_end": True,
    "use_mm_proj": True,
    "tower_config": {
        "embed_dim": WIDTH,
        "depth_in_timm": BLOCKS + 1,  # the model drops the last
        "num_heads": 4,
        "mlp_hidden": TOWER_FFN,
        "patch_size": PATCH,
        "pos_grid": [TABLE_SIDE, TABLE_SIDE],
    },
}


def shapes() -> Iterator[Shape]:
    """Every tensor of the checkpoint, by the name that the released one has for it."""
    vocabulary, key_rows = SENTENCEPIECE_VOCABULARY + len(ADDED), KEY_HEADS * (HIDDEN // HEADS)
    yield from (("model.embed_tokens.weight", (vocabulary, HIDDEN)), ("lm_head.weight", (vocabulary, HIDDEN)))
    yield "model.norm.weight", (HIDDEN,)
    for layer in (f"model.layers.{number}." for number in range(LAYERS)):
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}{name}.weight", (HIDDEN,)
        for name, rows in (("q", HIDDEN), ("k", key_rows), ("v", key_rows), ("o", HIDDEN)):
            yield f"{layer}self_attn.{name}_proj.weight", (rows, HIDDEN)
        for name in ("gate", "up"):
            yield f"{layer}mlp.{name}_proj.weight", (FFN, HIDDEN)
        yield f"{layer}mlp.down_proj.weight", (HIDDEN, FFN)
    tower = "model.vision_tower."
    yield f"{tower}cls_token", (1, 1, WIDTH)
    yield f"{tower}pos_embed", (1, TABLE_SIDE**2 + 1, WIDTH)
    yield f"{tower}patch_embed.proj.weight", (WIDTH, 3, PATCH, PATCH)
    yield f"{tower}patch_embed.proj.bias", (WIDTH,)
    yield from norm(f"{tower}norm", WIDTH)
    for block in (f"{tower}blocks.{number}." for number in range(BLOCKS)):
        yield from norm(f"{block}norm1", WIDTH)
        yield from norm(f"{block}norm2", WIDTH)
        yield f"{block}attn.qkv.weight", (3 * WIDTH, WIDTH)
        yield from ((f"{block}attn.{name}_bias", (WIDTH,)) for name in "qv")
        yield from linear(f"{block}attn.proj", WIDTH, WIDTH)
        yield from linear(f"{block}mlp.fc1", TOWER_FFN, WIDTH)
        yield from linear(f"{block}mlp.fc2", WIDTH, TOWER_FFN)
    resampler = "model.resampler."
    yield from ((f"{resampler}{table}", (QUERIES, HIDDEN)) for table in ("query", "pos_embed"))
    yield from ((f"{resampler}kv_proj.weight", (HIDDEN, WIDTH)), (f"{resampler}proj", (HIDDEN, HIDDEN)))
    yield f"{resampler}attn.in_proj_weight", (3 * HIDDEN, HIDDEN)
    yield f"{resampler}attn.in_proj_bias", (3 * HIDDEN,)
    yield from linear(f"{resampler}attn.out_proj", HIDDEN, HIDDEN)
    for name in ("ln_q", "ln_kv", "ln_post"):
        yield from norm(f"{resampler}{name}", HIDDEN)


def write(out: Path) -> None:
    """Writes images, records and model."""
    texts = write_records(out, random.Random(0))
    write_weights(out / "model", shapes(), CONFIG)
    write_sentencepiece(out / "model", [*texts, *[SYSTEM] * 20], ADDED)


if __name__ == "__main__":
    write_as_asked(write, "a tiny OmniLMM, and images with questions")
