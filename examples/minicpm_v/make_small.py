"""A tiny MiniCPM-V 2.0 with drawn weights, and images with questions.

    python make_small.py --out FOLDER

writes FOLDER/model (config.json, model.safetensors and tokenizer, as the released folder has them), FOLDER/images, and
FOLDER/train.json and FOLDER/validation.json in the form of MiniCPM-V's finetune script.

The released code takes its tower's sizes from timm's name for it, so config.json has no keys for them; a model of other
sizes gives them in `tower_config`. Needs the repository's root in PYTHONPATH, as run.sh sets it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from PIL import Image, ImageDraw

from examples.drawn_models import (
    SENTENCEPIECE_VOCABULARY,
    Shape,
    linear,
    norm,
    write_as_asked,
    write_sentencepiece,
    write_weights,
)

TRAIN, VALIDATION = 160, 24
COLOURS = {"red": "#d02020", "green": "#20a030", "blue": "#2040d0", "yellow": "#e0d020", "black": "#101010"}
SHAPES = ("circle", "square", "triangle")
QUESTIONS = ("What is in the picture?", "What do you see?", "Name the shape and its colour.")
SIDES = (56, 72, 100, 128)
"""Pixels; images of more than 56 x 56 are cut into tiles."""

ADDED = (
    "<image>", "</image>", "<ref>", "</ref>", "<box>", "</box>", "<quad>", "</quad>", "<point>", "</point>", "<slice>",
    "</slice>",
)  # fmt: skip
HIDDEN, LAYERS, HEADS, FFN = 128, 2, 4, 256
WIDTH, BLOCKS, TOWER_FFN, PATCH, TABLE_SIDE = 64, 2, 128, 14, 4
QUERIES = 4
CONFIG = {
    "architectures": ["MiniCPMV"],
    "model_type": "minicpmv",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 64,
    "tie_word_embeddings": False,
    "vocab_size": SENTENCEPIECE_VOCABULARY + len(ADDED),
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
    "query_num": QUERIES,
    "image_size": 56,
    "patch_size": PATCH,
    "max_slice_nums": 4,
    "scale_resolution": 56,
    "slice_mode": True,
    "drop_vision_last_layer": True,
    "vision_encoder": "vit_tiny_patch14_siglip_56",
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
    vocabulary = SENTENCEPIECE_VOCABULARY + len(ADDED)
    yield from (("llm.model.embed_tokens.weight", (vocabulary, HIDDEN)), ("llm.lm_head.weight", (vocabulary, HIDDEN)))
    yield "llm.model.norm.weight", (HIDDEN,)
    for layer in (f"llm.model.layers.{number}." for number in range(LAYERS)):
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}{name}.weight", (HIDDEN,)
        for name in "qkvo":
            yield f"{layer}self_attn.{name}_proj.weight", (HIDDEN, HIDDEN)
        for name in ("gate", "up"):
            yield f"{layer}mlp.{name}_proj.weight", (FFN, HIDDEN)
        yield f"{layer}mlp.down_proj.weight", (HIDDEN, FFN)
    yield "vpm.patch_embed.proj.weight", (WIDTH, 3, PATCH, PATCH)
    yield "vpm.patch_embed.proj.bias", (WIDTH,)
    yield "vpm.pos_embed", (1, TABLE_SIDE**2, WIDTH)
    yield from norm("vpm.norm", WIDTH)
    for block in (f"vpm.blocks.{number}." for number in range(BLOCKS)):
        yield from norm(f"{block}norm1", WIDTH)
        yield from norm(f"{block}norm2", WIDTH)
        yield from linear(f"{block}attn.qkv", 3 * WIDTH, WIDTH)
        yield from linear(f"{block}attn.proj", WIDTH, WIDTH)
        yield from linear(f"{block}mlp.fc1", TOWER_FFN, WIDTH)
        yield from linear(f"{block}mlp.fc2", WIDTH, TOWER_FFN)
    for table in ("query", "pos_embed"):
        yield f"resampler.{table}", (QUERIES, HIDDEN)
    yield "resampler.kv_proj.weight", (HIDDEN, WIDTH)
    yield "resampler.proj", (HIDDEN, HIDDEN)
    yield from (("resampler.attn.in_proj_weight", (3 * HIDDEN, HIDDEN)), ("resampler.attn.in_proj_bias", (3 * HIDDEN,)))
    yield from linear("resampler.attn.out_proj", HIDDEN, HIDDEN)
    for name in ("ln_q", "ln_kv", "ln_post"):
        yield from norm(f"resampler.{name}", HIDDEN)


def drawn_image(rng: random.Random, colour: str, shape: str) -> Image.Image:
    """One shape somewhere on a light ground."""
    width, height = rng.choice(SIDES), rng.choice(SIDES)
    image = Image.new("RGB", (width, height), (rng.randrange(200, 256),) * 3)
    size = rng.uniform(0.5, 0.8) * min(width, height)
    left, top = rng.uniform(0, width - size), rng.uniform(0, height - size)
    box = (left, top, left + size, top + size)
    drawing, fill = ImageDraw.Draw(image), COLOURS[colour]
    if shape == "circle":
        drawing.ellipse(box, fill=fill)
    elif shape == "square":
        drawing.rectangle(box, fill=fill)
    else:
        drawing.polygon([(left, box[3]), (box[2], box[3]), (left + size / 2, top)], fill=fill)
    return image


def write_records(out: Path, rng: random.Random) -> list[str]:
    """Writes images and records, and returns their texts."""
    (out / "images").mkdir(parents=True)
    texts: list[str] = []
    for name, count in (("train", TRAIN), ("validation", VALIDATION)):
        records = []
        for number in range(count):
            colour, shape = rng.choice(list(COLOURS)), rng.choice(SHAPES)
            path = f"images/{name}_{number:03}.png"
            drawn_image(rng, colour, shape).save(out / path)
            question, answer = rng.choice(QUESTIONS), f"A {colour} {shape}."
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            records.append({"id": str(number), "image": path, "conversations": turns})
            texts += [question, answer]
        (out / f"{name}.json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    return texts


def write(out: Path) -> None:
    """Writes images, records and model."""
    texts = write_records(out, random.Random(0))
    write_weights(out / "model", shapes(), CONFIG)
    write_sentencepiece(out / "model", texts, ADDED)


if __name__ == "__main__":
    write_as_asked(write, "a tiny MiniCPM-V 2.0, and images with questions")
