"""A small model, an adapter and real records of compared answers, as TRL and the engine both read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def save_model_and_adapter(folder: Path, data_dir: Path, seed: int, *, experts: bool = False) -> None:
    """`model`: a Qwen3 of MiniMind's kind with its tokenizer; `adapter`: a PEFT folder with non-zero B.

    Args:
        experts: the model is a mixture of four, whose routers do not choose evenly; its adapters are on attention.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": 6400, "hidden_size": 48, "intermediate_size": 112, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 512,
        "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    if experts:
        mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **mixture))
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.mlp.gate.weight, std=0.3)
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(data_dir / "tokenizers" / "minimind").save_pretrained(folder / "model")
    targets = TARGETS[:4] if experts else TARGETS
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    adapted.save_pretrained(folder / "adapter")


def short_pairs(data_dir: Path, count: int) -> list[dict[str, str]]:
    """Real pairs as texts, with questions that leave room for an answer and answers that differ within it."""
    records = json.loads((data_dir / "preference" / "dpo_en_demo.json").read_text(encoding="utf-8"))
    short = [
        {
            "prompt": record["conversations"][-1]["value"].strip()[:200] + "\n",
            "chosen": record["chosen"]["value"].strip(),
            "rejected": record["rejected"]["value"].strip(),
        }
        for record in records
    ]
    kept = [
        record
        for record in short
        if len(record["prompt"]) < 150 and record["chosen"][:20] != record["rejected"][:20] and record["rejected"]
    ]
    assert len(kept) >= count, (len(kept), count)
    return kept[:count]


def write_records(path: Path, records: list[dict[str, object]] | list[dict[str, str]]) -> None:
    """JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
