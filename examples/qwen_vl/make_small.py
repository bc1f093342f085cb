"""A tiny Qwen2.5-VL with drawn weights, and pictures with questions.

    python make_small.py --out FOLDER

writes FOLDER/model (config.json, model.safetensors, tokenizer and preprocessor_config.json, as the released folder has
them), and the pictures and records of `examples/minicpm_v`. Needs the repository's root in PYTHONPATH, as run.sh sets
it.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from examples.minicpm_v.make_small import linear, write_records

ADDED = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
PIECES, VOCABULARY = 360, 384
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
    "vocab_size": VOCABULARY,
    "torch_dtype": "float32",
    "bos_token_id": PIECES,
    "eos_token_id": PIECES + ADDED.index("<|im_end|>"),
    "vision_start_token_id": PIECES + ADDED.index("<|vision_start|>"),
    "vision_end_token_id": PIECES + ADDED.index("<|vision_end|>"),
    "image_token_id": PIECES + ADDED.index("<|image_pad|>"),
    "video_token_id": PIECES + ADDED.index("<|video_pad|>"),
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
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen2.5-VL's own, without its system message."""


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the checkpoint, by the name that the released one has for it."""
    yield from (("model.embed_tokens.weight", (VOCABULARY, HIDDEN)), ("lm_head.weight", (VOCABULARY, HIDDEN)))
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


def draw(name: str, shape: tuple[int, ...]) -> Tensor:
    """Normal weights, which keep the size of what passes through; norms that do nothing yet; biases of 0."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    drawn = torch.randn(shape)
    return drawn * 0.1 if "embed_tokens" in name else drawn / drawn[0].numel() ** 0.5


def write_tokenizer(folder: Path, texts: list[str]) -> None:
    """Writes a byte-level BPE of PIECES pieces that has read `texts`, with Qwen's tokens behind them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=PIECES, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    pieces = [f"<|unused_{number}|>" for number in range(PIECES - tokenizer.get_vocab_size())]
    tokenizer.add_special_tokens([*pieces, *ADDED])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def write_model(folder: Path, texts: list[str]) -> None:
    """Writes configuration, weights, tokenizer and the image processor's settings."""
    folder.mkdir()
    torch.manual_seed(0)
    save_file({name: draw(name, shape) for name, shape in shapes()}, folder / "model.safetensors", {"format": "pt"})
    for name, settings in (("config.json", CONFIG), ("preprocessor_config.json", PROCESSOR)):
        (folder / name).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(folder, texts)


def write(out: Path) -> None:
    """Writes pictures, records and model."""
    write_model(out / "model", write_records(out, random.Random(0)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny Qwen2.5-VL and pictures with questions.")
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    if out.exists() and any(out.iterdir()):
        parser.error(f"{out} is not empty: give another folder")
    write(out)
    print(f"the model is in {out / 'model'}, records of pictures in train.json and validation.json beside it")


if __name__ == "__main__":
    main()
