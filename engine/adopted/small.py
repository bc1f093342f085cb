"""Small models of the same make: a config's sizes replaced, everything that says how the model computes kept."""

from __future__ import annotations

from math import gcd, lcm
from typing import Any

SIZES: dict[str, int] = {
    "attention_chunk_size": 8,
    "attention_head_size": 16,
    "d_model": 64,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "encoder_layers": 1,
    "expand": 2,
    "ffn_dim": 96,
    "global_head_dim": 16,
    "head_dim": 16,
    "hidden_size": 64,
    "hidden_size_per_layer_input": 16,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "index_topk": 8,
    "intermediate_size": 96,
    "kv_lora_rank": 16,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "lru_width": 64,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_head_dim": 32,
    "mamba_n_groups": 1,
    "mamba_n_heads": 4,
    "mamba_num_heads": 4,
    "max_position_embeddings": 128,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "n_embd": 64,
    "n_group": 1,
    "n_groups": 1,
    "n_head": 4,
    "n_heads": 4,
    "n_inner": 96,
    "n_positions": 128,
    "n_routed_experts": 4,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "rnn_width": 64,
    "shared_expert_intermediate_size": 32,
    "sliding_window": 8,
    "ssm_state_size": 16,
    "state_size": 16,
    "topk_group": 1,
    "v_head_dim": 16,
    "vocab_size": 256,
    "word_embed_proj_dim": 64,
}
"""Keys of a `config.json` that are sizes, and what a small model has."""
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")

_KEEP_LAYERS = 4
"""Layers of a small model, or more where that many kinds of layers come one after the other."""


def small_config(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Returns the `config.json` of a small model that is made as this one is.

    Args:
        hf_config: with all of its keys, as transformers' own record of it writes them.
    """
    small = {key: _small(key, value) for key, value in hf_config.items()}
    count = next((hf_config[key] for key in LAYER_COUNTS if isinstance(hf_config.get(key), int)), None)
    if count:
        indices = _chosen_layers(hf_config, count)
        for key in LAYER_COUNTS:
            if key in small and isinstance(small[key], int):
                small[key] = len(indices)
        for key, value in hf_config.items():
            if isinstance(value, list) and len(value) == count:
                small[key] = [value[index] for index in indices]
    heads, keys = (hf_config.get(key) for key in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and heads == keys:
        small["num_key_value_heads"] = small["num_attention_heads"]
    if isinstance(small.get("qk_rope_head_dim"), int) and hf_config.get("head_dim") == hf_config["qk_rope_head_dim"]:
        small["head_dim"] = small["qk_rope_head_dim"]
    for key in ("text_config", "llm_config"):
        if isinstance(hf_config.get(key), dict):
            small[key] = small_config(hf_config[key])
    for key, value in small.items():
        if key.endswith("_token_id") and isinstance(value, int):
            small[key] = min(value, SIZES["vocab_size"] - 1)
    return small


def _small(key: str, value: Any) -> Any:
    if key not in SIZES or not isinstance(value, int) or isinstance(value, bool):
        return value
    if key == "num_key_value_heads" and value == 1:
        return 1
    return min(value, SIZES[key]) if value > 0 else value


_DIVIDED = tuple(
    key for key in SIZES if "heads" in key or "intermediate" in key or key in ("ffn_dim", "n_head", "n_inner")
)
"""Sizes that tensor ranks divide."""


def divided_config(small: dict[str, Any], whole: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Returns the `config.json` of a small model whose sizes divide over tensor ranks where the whole model's do.

    Args:
        small: of `small_config`.
        whole: of the model.
    """
    found = dict(small)
    for key, value in small.items():
        if isinstance(value, dict) and isinstance(whole.get(key), dict):
            found[key] = divided_config(value, whole[key], ranks)
        size = whole.get(key)
        if key in _DIVIDED and isinstance(value, int) and isinstance(size, int) and value > 0:
            found[key] = lcm(value, ranks) if size % ranks == 0 else gcd(size, ranks)
    heads, keys = found.get("num_attention_heads"), found.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(keys, int):
        found["num_attention_heads"] = lcm(heads, keys)
    hidden = found.get("hidden_size")
    if isinstance(heads, int) and isinstance(hidden, int):
        found["hidden_size"] = lcm(hidden, found["num_attention_heads"])
    return found


def chosen_layers(hf_config: dict[str, Any]) -> list[int]:
    """Returns the layers of a model that the small one has."""
    return _chosen_layers(*_with_layers(hf_config))


def layer_kind(hf_config: dict[str, Any], index: int) -> str:
    """Returns what the lists of a config say of a layer."""
    layered, count = _with_layers(hf_config)
    return repr([value[index] for value in layered.values() if isinstance(value, list) and len(value) == count])


def _with_layers(hf_config: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Returns the config, or the one inside it, that has the number of layers, and that number."""
    inner = (hf_config.get(key) for key in ("text_config", "llm_config"))
    for found in (hf_config, *(one for one in inner if isinstance(one, dict))):
        for key in LAYER_COUNTS:
            if isinstance(found.get(key), int):
                return found, found[key]
    raise AssertionError("a config that is read has layers")


def _chosen_layers(hf_config: dict[str, Any], count: int) -> list[int]:
    """Returns the first layer of each kind, and as many of the first ones beside them as make up the least number."""
    lists = [value for value in hf_config.values() if isinstance(value, list) and len(value) == count]
    kinds: dict[str, int] = {}
    for index in range(count):
        kinds.setdefault(repr([values[index] for values in lists]), index)
    chosen = set(kinds.values())
    for index in range(count):
        if len(chosen) >= min(_KEEP_LAYERS, count):
            break
        chosen.add(index)
    return sorted(chosen)
