"""A tiny GLM-4 and a tiny GLM-4.7-Flash with drawn weights, and questions: types that the engine has no family for.

    python make_small.py --out FOLDER

writes FOLDER/model and FOLDER/mixture (config.json, model.safetensors and tokenizer), which transformers makes and
saves as it does with released models, and FOLDER/train.json and FOLDER/validation.json. Needs the repository's root in
PYTHONPATH, as run.sh sets it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from torch import nn

from examples.drawn_models import QWEN_VOCABULARY, qwen_token, write_as_asked, write_byte_level, write_json
from examples.qwen3_30b_a3b.make_small import records

HIDDEN, HEADS = 64, 4
COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 512,
    "vocab_size": QWEN_VOCABULARY,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": qwen_token("<|im_end|>"),
    "pad_token_id": qwen_token("<|endoftext|>"),
}
MODEL = {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": HIDDEN // HEADS}
"""What a glm4 has beside COMMON: norms behind attention and MLP, rotations of half of each head."""
MIXTURE = {
    "num_hidden_layers": 3,
    "num_key_value_heads": HEADS,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
"""The same of a glm4_moe_lite: latent attention and experts."""


def write_model(model_type: str, sizes: dict[str, Any], folder: Path) -> None:
    """Writes a model of a type that transformers has."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **COMMON, **sizes))
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.1 if "embed" in name else parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)


def write(out: Path) -> None:
    """Writes records and models."""
    numbers, texts = random.Random(0), []
    for model_type, sizes, name in (("glm4", MODEL, "model"), ("glm4_moe_lite", MIXTURE, "mixture")):
        write_model(model_type, sizes, out / name)
    for name, count in (("train", 240), ("validation", 24)):
        made = records(count, numbers)
        texts += [json.dumps(record) for record in made]
        write_json(out / f"{name}.json", made)
    for name in ("model", "mixture"):
        write_byte_level(out / name, texts)


if __name__ == "__main__":
    write_as_asked(write, "a tiny GLM-4, a tiny GLM-4.7-Flash, and questions")
