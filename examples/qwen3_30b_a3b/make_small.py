"""A tiny Qwen3-MoE with drawn weights, and questions.

    python make_small.py --out FOLDER

writes FOLDER/model (config.json, model.safetensors and tokenizer) with its tensors named as in the released folder, and
FOLDER/train.json and FOLDER/validation.json. Needs the repository's root in PYTHONPATH, as run.sh sets it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from examples.drawn_models import (
    QWEN_VOCABULARY,
    Shape,
    qwen_token,
    write_as_asked,
    write_byte_level,
    write_json,
    write_weights,
)

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
    "vocab_size": QWEN_VOCABULARY,
    "torch_dtype": "float32",
    "eos_token_id": qwen_token("<|im_end|>"),
}
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def shapes() -> Iterator[Shape]:
    """Every tensor of the checkpoint, by the name that the released one has for it."""
    yield from ((f"{name}.weight", (QWEN_VOCABULARY, HIDDEN)) for name in ("model.embed_tokens", "lm_head"))
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
    model, numbers = out / "model", random.Random(0)
    write_weights(model, shapes(), CONFIG)
    texts: list[str] = []
    for name, count in (("train", 240), ("validation", 24)):
        made = records(count, numbers)
        texts += [json.dumps(record) for record in made]
        write_json(out / f"{name}.json", made)
    write_byte_level(model, texts)


if __name__ == "__main__":
    write_as_asked(write, "a tiny Qwen3-MoE, and questions")
