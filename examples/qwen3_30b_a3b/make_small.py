"""A tiny Qwen3-MoE with drawn weights, and questions.

    python make_small.py --out FOLDER

writes FOLDER/model (config.json, model.safetensors and tokenizer) with its tensors named as in the released folder, and
FOLDER/train.json and FOLDER/validation.json. Needs the repository's root in PYTHONPATH, as run.sh sets it.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from examples.qwen_vl.make_small import PIECES, VOCABULARY, draw, write_tokenizer

HIDDEN, LAYERS, HEADS, KEY_HEADS, HEAD, EXPERTS, INNER = 64, 3, 4, 2, 16, 8, 48
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "moe_intermediate_size": INNER,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "head_dim": HEAD,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "vocab_size": VOCABULARY,
    "torch_dtype": "float32",
    "eos_token_id": PIECES + 2,
}
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the checkpoint, by the name that the released one has for it."""
    yield from (("model.embed_tokens.weight", (VOCABULARY, HIDDEN)), ("lm_head.weight", (VOCABULARY, HIDDEN)))
    yield "model.norm.weight", (HIDDEN,)
    for layer in (f"model.layers.{number}." for number in range(LAYERS)):
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}{name}.weight", (HIDDEN,)
        for name, heads in (("q", HEADS), ("k", KEY_HEADS), ("v", KEY_HEADS)):
            yield f"{layer}self_attn.{name}_proj.weight", (heads * HEAD, HIDDEN)
        yield f"{layer}self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD)
        for name in ("q", "k"):
            yield f"{layer}self_attn.{name}_norm.weight", (HEAD,)
        yield f"{layer}mlp.gate.weight", (EXPERTS, HIDDEN)
        for expert in (f"{layer}mlp.experts.{number}." for number in range(EXPERTS)):
            for name in ("gate", "up"):
                yield f"{expert}{name}_proj.weight", (INNER, HIDDEN)
            yield f"{expert}down_proj.weight", (HIDDEN, INNER)


def records(count: int, numbers: random.Random) -> list[dict[str, object]]:
    """Returns conversations: which of two numbers is larger."""
    made = []
    for _ in range(count):
        first, second = numbers.sample(range(len(WORDS)), 2)
        question = f"Which is larger, {WORDS[first]} or {WORDS[second]}?"
        turns = (("user", question), ("assistant", f"It is {WORDS[max(first, second)]}."))
        made.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    return made


def write(out: Path) -> None:
    """Writes records and model."""
    folder, numbers = out / "model", random.Random(0)
    folder.mkdir(parents=True)
    texts = []
    for name, count in (("train", 240), ("validation", 24)):
        made = records(count, numbers)
        texts += [json.dumps(record) for record in made]
        (out / f"{name}.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    torch.manual_seed(0)
    save_file({name: draw(name, shape) for name, shape in shapes()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(folder, texts)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny Qwen3-MoE and questions.")
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    if out.exists() and any(out.iterdir()):
        parser.error(f"{out} is not empty: give another folder")
    write(out)
    print(f"the model is in {out / 'model'}, records in train.json and validation.json beside it")


if __name__ == "__main__":
    main()
