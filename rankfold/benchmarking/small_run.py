"""A small self-contained run: a model's sizes, a tokenizer, records and a configuration. For checks on a
machine that has no models and no network."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SMALL_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 1024,
    "max_position_embeddings": 2048, "bos_token_id": 0, "eos_token_id": 1, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}  # fmt: skip
"""Sizes that divide over eight ranks of any axis."""
SMALL_MIXTURE = {
    **SMALL_LLAMA, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 32,
    "moe_intermediate_size": 256, "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}  # fmt: skip
"""The same with experts in every layer."""

SMALL_HYBRID = {
    **SMALL_LLAMA, "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "head_dim": 32,
    "linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
"""The same with gated delta nets in three layers of four."""

_RECORDS, _PROMPTS = 256, 64
_WORDS = {"<s>": 0, "</s>": 1, "<unk>": 2, **{f"w{number}": number for number in range(3, 1024)}}
_TOKENIZER = {
    "version": "1.0",
    "added_tokens": [
        {"id": number, "content": word, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for word, number in list(_WORDS.items())[:3]
    ],
    "pre_tokenizer": {"type": "WhitespaceSplit"},
    "model": {"type": "WordLevel", "vocab": _WORDS, "unk_token": "<unk>"},
}  # fmt: skip
"""A token a word."""

_CONFIG = """\
# Adapters on all linears of a small model with random weights, on packed records of random words.
model: {{path: {model}, init: random}}
lora: {{rank: 8, alpha: 16, dropout: 0.1}}
data: {{train: {data}, format: text, seq_length: 256, packing: true}}
optim: {{lr: 1.0e-4}}
train: {{steps: 8, micro_batch_size: 1, global_batch_size: 16}}
"""


def write_small_run(folder: Path, sizes: Mapping[str, Any] = SMALL_LLAMA) -> None:
    """Writes config.json, tokenizer.json, train.jsonl, prompts.jsonl and run.yaml, the same each time.

    Args:
        folder: to write to.
        sizes: of the model, config.json.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(sizes, indent=2) + "\n", encoding="utf-8")
    (folder / "tokenizer.json").write_text(json.dumps(_TOKENIZER) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": "<s>"}) + "\n", "utf-8")
    drawn = random.Random(0)
    with (folder / "train.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(_RECORDS):
            words = [f"w{drawn.randrange(3, len(_WORDS))}" for _ in range(drawn.randrange(16, 250))]
            file.write(json.dumps({"text": " ".join(words)}) + "\n")
    with (folder / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(_PROMPTS):
            words = [f"w{drawn.randrange(3, len(_WORDS))}" for _ in range(drawn.randrange(4, 32))]
            file.write(json.dumps({"prompt": " ".join(words)}) + "\n")
    text = _CONFIG.format(model=json.dumps(str(folder)), data=json.dumps(str(folder / "train.jsonl")))
    (folder / "run.yaml").write_text(text, encoding="utf-8")
