"""Small models of the same make: a config's sizes replaced, everything that says how the model computes kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd, lcm
from typing import Any

from engine.adopted.images.sizes import (
    TOWER_SIZES,
    TOWERS,
    Relations,
    Sizes,
    distinct_tokens,
    features_of_layers,
    relate,
    relate_parts,
    relate_tower,
    small_size,
    tower_layers,
)

SIZES: dict[str, int] = {
    "adapter_input_size": 64,
    "adapter_out_dim": 64,
    "attention_chunk_size": 8,
    "attention_head_dim": 32,
    "attention_head_size": 16,
    "attention_hidden_size": 128,
    "audio_vocab_size": 64,
    "d_head": 16,
    "d_inner": 96,
    "d_kv": 16,
    "d_model": 64,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "decoder_vocab_size": 256,
    "dense_intermediate_size": 96,
    "dim_ff": 96,
    "dim_head": 16,
    "dim_model": 64,
    "emb_dim": 64,
    "embedding_dim": 64,
    "embedding_size": 32,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "encoder_layers": 1,
    "expand": 2,
    "expert_ffn_hidden_size": 32,
    "feed_forward_size": 96,
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "global_head_dim": 16,
    "global_num_key_value_heads": 2,
    "hc_lowrank": 16,
    "head_dim": 16,
    "hidden_size": 64,
    "hidden_size_per_layer_input": 16,
    "index_head_dim": 16,
    "index_kpool": 4,
    "index_n_heads": 16,
    "index_topk": 8,
    "indexer_budget": 8,
    "indexer_head_dim": 16,
    "indexer_n_heads": 4,
    "input_size": 64,
    "intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "kv_channels": 16,
    "kv_lora_rank": 16,
    "kv_n_heads": 2,
    "laurel_rank": 8,
    "linear_head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_num_heads": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "local_attention": 8,
    "lru_width": 64,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_dt_rank": 4,
    "mamba_expand": 2,
    "mamba_head_dim": 32,
    "mamba_n_groups": 1,
    "mamba_n_heads": 4,
    "mamba_num_heads": 4,
    "max_position_embeddings": 128,
    "max_seq_len": 128,
    "moe_intermediate_size": 32,
    "moe_k": 2,
    "moe_num_experts": 4,
    "moe_shared_expert_intermediate_size": 32,
    "moe_top_k": 2,
    "moe_topk": 2,
    "n_embd": 64,
    "n_group": 1,
    "n_groups": 1,
    "n_head": 4,
    "n_heads": 4,
    "n_inner": 96,
    "n_mamba_heads": 4,
    "n_positions": 128,
    "n_routed_experts": 4,
    "ngram_vocab_size_base": 64,
    "num_attention_heads": 4,
    "num_blocks": 4,
    "num_expert_group": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "num_global_key_value_heads": 2,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "o_groups": 2,
    "o_lora_rank": 16,
    "ple_embed_dim": 64,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "rnn_width": 64,
    "rotary_dim": 8,
    "router_hidden_size": 16,
    "shared_expert_intermediate_size": 32,
    "sliding_window": 8,
    "split_ngram_parts": 2,
    "ssm_state_size": 16,
    "state_size": 16,
    "swa_head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_v_head_dim": 16,
    "top_k_experts": 2,
    "topk_group": 1,
    "v_head_dim": 16,
    "vocab_size": 256,
    "vocab_size_per_layer_input": 256,
    "word_embed_proj_dim": 32,
    "zero_expert_num": 2,
}
"""Keys of a `config.json` that are sizes, and what a small model has."""
LAYER_COUNTS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "num_decoder_layers",
    "num_blocks",
)
"""Keys of a `config.json` that may say how many layers a decoder has."""

_KEEP_LAYERS = 4
"""Layers of a small model, or more where it has more kinds of layers."""
_MOST_PAIRS = 4
"""Two layers of each kind are kept where there are no more kinds: some of transformers' modules share weights."""

_RELATIONS: Relations = (
    ("num_key_value_heads", lambda c: c["num_attention_heads"]),
    ("num_key_value_heads", lambda c: c["n_heads"]),
    ("head_dim", lambda c: c["qk_rope_head_dim"]),
    ("head_dim", lambda c: c["hidden_size"] * c["expand"] / c["num_heads"]),
    ("head_dim", lambda c: c["qk_nope_head_dim"] + c["qk_rope_head_dim"]),
    ("qk_rope_head_dim", lambda c: c["head_dim"] * c["partial_rotary_factor"]),
    ("qk_head_dim", lambda c: c["qk_nope_head_dim"] + c["qk_rope_head_dim"]),
    ("kv_channels", lambda c: c["hidden_size"] / c["num_attention_heads"]),
    ("num_query_groups", lambda c: c["num_attention_heads"]),
    ("mamba_d_ssm", lambda c: c["mamba_n_heads"] * c["mamba_d_head"]),
    ("mamba_d_head", lambda c: c["hidden_size"] * c["mamba_expand"] / c["mamba_n_heads"]),
    ("mamba_headdim", lambda c: c["hidden_size"] * c["mamba_expand"] / c["n_mamba_heads"]),
    ("attention_hidden_size", lambda c: c["hidden_size"]),
    ("attention_head_dim", lambda c: c["attention_hidden_size"] / c["num_attention_heads"]),
    ("adapter_in_dim", lambda c: c["hidden_size"]),
    ("embedding_size", lambda c: c["hidden_size"]),
    ("word_embed_proj_dim", lambda c: c["hidden_size"]),
    ("time_step_rank", lambda c: c["hidden_size"] / 16),
    ("d_head", lambda c: c["d_model"] / c["n_head"]),
)
"""Sizes that follow from others in some families: what holds of a config is made to hold of the small one."""


def small_config(
    hf_config: dict[str, Any], sizes: Mapping[str, int] = SIZES, fewest: int | None = None
) -> dict[str, Any]:
    """Returns the `config.json` of a small model that is made as this one is.

    Args:
        hf_config: with all of its keys, as transformers' own record of it writes them.
        sizes: by key, what the small one has.
        fewest: layers that are kept, where it has as many; None for the usual number.
    """
    fewest = fewest or _fewest_layers(hf_config)
    small = {key: _small(key, value, sizes) for key, value in hf_config.items()}
    counts = LAYER_COUNTS if sizes is SIZES else _TOWER_COUNTS
    count = next((hf_config[key] for key in counts if isinstance(hf_config.get(key), int)), None)
    if count:
        indices = _chosen_layers(hf_config, count, fewest)
        for key in counts:
            if key in small and isinstance(small[key], int):
                small[key] = len(indices)
        for key, value in hf_config.items():
            small[key] = _of_layers(key, value, count, indices, small[key])
        if isinstance(shared := hf_config.get("num_kv_shared_layers"), int):
            small["num_kv_shared_layers"] = sum(index >= count - shared for index in indices)
    relate(_RELATIONS, hf_config, small)
    _relate_positions(hf_config, small)
    for layer, own in (small.get("per_layer_config") or {}).items():
        related = {**small, **own}
        relate(_RELATIONS, {**hf_config, **_entry(hf_config["per_layer_config"], indices[int(layer)])}, related)
        own.update({key: value for key, value in related.items() if key in own or value != small[key]})
    for key, value in hf_config.items():
        if isinstance(value, dict) and "model_type" in value:
            tower = key in TOWERS
            kept = tower_layers(hf_config, value) if tower else fewest
            small[key] = small_config(value, TOWER_SIZES if tower else SIZES, kept)
    if sizes is not SIZES:
        relate_tower(hf_config, small)
    elif any(isinstance(hf_config.get(key), dict) for key in TOWERS):
        relate_parts(hf_config, small)
        distinct_tokens(hf_config, small, SIZES["vocab_size"])
    for key, value in small.items():
        if key.endswith("_token_id") and isinstance(value, int):
            small[key] = min(value, SIZES["vocab_size"] - 1)
    return small


_TOWER_COUNTS = ("depth", *LAYER_COUNTS)


def _small(key: str, value: Any, sizes: Mapping[str, int] = SIZES) -> Any:
    if sizes is not SIZES:
        value = small_size(key, value, sizes)
    if key not in sizes or not isinstance(value, int) or isinstance(value, bool):
        return value
    if key.endswith("num_key_value_heads") and value == 1:
        return 1
    return min(value, sizes[key]) if value > 0 else value


_DIVIDED = tuple(
    key for key in SIZES if "heads" in key or "intermediate" in key or key in ("ffn_dim", "n_head", "n_inner")
)
"""Sizes that tensor ranks divide."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Sizes that expert ranks divide."""


def divided_config(small: dict[str, Any], whole: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Returns the `config.json` of a small model whose sizes divide over tensor or expert ranks where the whole model's
    do.

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
        if key in _EXPERTS and isinstance(value, int) and isinstance(size, int) and value > 0 and size % ranks == 0:
            found[key] = lcm(value, ranks)
    heads, keys = found.get("num_attention_heads"), found.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(keys, int):
        found["num_attention_heads"] = lcm(heads, keys)
    hidden = found.get("hidden_size")
    if isinstance(heads, int) and isinstance(hidden, int):
        found["hidden_size"] = lcm(hidden, found["num_attention_heads"])
    return found


def chosen_layers(hf_config: dict[str, Any]) -> list[int]:
    """Returns the layers of a model that the small one has."""
    return _chosen_layers(*_with_layers(hf_config), _fewest_layers(hf_config))


def _fewest_layers(hf_config: dict[str, Any]) -> int:
    """Returns how many layers are kept: where the first ones are given features of a tower's layers, two more."""
    return max(_KEEP_LAYERS, 2 + features_of_layers(hf_config))


def layer_kind(hf_config: dict[str, Any], index: int) -> str:
    """Returns what the lists of a config say of a layer."""
    layered, count = _with_layers(hf_config)
    return repr(_kinds(layered, count)[index])


def _with_layers(hf_config: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Returns the config, or the one inside it, that has the number of layers, and that number."""
    inner = (hf_config.get(key) for key in ("text_config", "llm_config"))
    for found in (hf_config, *(one for one in inner if isinstance(one, dict))):
        for key in LAYER_COUNTS:
            if isinstance(found.get(key), int):
                return found, found[key]
    raise AssertionError("a config that is read has layers")


def _relate_positions(full: Sizes, small: dict[str, Any]) -> None:
    """Divides the rotated features of a small head among time, height and width as those of the whole one are."""
    rope = full.get("rope_parameters")
    if not isinstance(rope, dict) or not isinstance(sections := rope.get("mrope_section"), list):
        return
    part = rope.get("partial_rotary_factor") or full.get("partial_rotary_factor") or 1
    if isinstance(full.get("head_dim"), int):
        small["head_dim"] = int(16 / part)
    widths = [one.get("head_dim") or one["hidden_size"] // one["num_attention_heads"] for one in (full, small)]
    if sum(sections) * 2 == int(widths[0] * part):
        rotated = int(widths[1] * part) // 2
        found = [one * rotated // sum(sections) for one in sections]
        found[-1] += rotated - sum(found)
        small["rope_parameters"] = {**rope, "mrope_section": found}


def _entry(table: dict[Any, Any], layer: int) -> Any:
    return next((value for key, value in table.items() if int(key) == layer), {})


def _of_layers(key: str, value: Any, count: int, indices: list[int], otherwise: Any) -> Any:
    """Returns what a small config has of an entry that is a list over layers, a list of some layers' indices, or a
    table by their index."""
    places = {layer: place for place, layer in enumerate(indices)}
    if isinstance(value, list):
        return list_of_layers(key, value, count, indices, otherwise)
    if key == "per_layer_config" and isinstance(value, dict):
        return {
            str(places[int(layer)]): {name: _small(name, size) for name, size in sizes.items()}
            for layer, sizes in value.items()
            if int(layer) in places
        }
    return otherwise


def list_of_layers(key: str, value: list[Any], count: int, indices: Sequence[int], otherwise: Any) -> Any:
    """Returns what a list over layers, or a list of some layers' indices, is for a model of fewer layers.

    Args:
        key: its name.
        count: of the whole model's layers.
        indices: of those that are kept.
        otherwise: for a list of anything else.
    """
    if value == list(range(count)):
        return list(range(len(indices)))
    if len(value) == count:
        return [value[index] for index in indices]
    named = "layer" in key or "idx" in key
    if named and value == sorted(set(value)) and all(isinstance(one, int) and 0 <= one < count for one in value):
        places = {layer: place for place, layer in enumerate(indices)}
        return [places[one] for one in value if one in places]
    return otherwise


def _kinds(hf_config: dict[str, Any], count: int) -> list[Any]:
    """Returns what a config says of each layer."""
    every = list(range(count))  # a list of all layers says the same of each
    lists = [
        value for value in hf_config.values() if isinstance(value, list) and len(value) == count and value != every
    ]
    table = hf_config.get("per_layer_config")
    shared = hf_config.get("num_kv_shared_layers") or 0
    return [
        (
            *(values[index] for values in lists),
            _entry(table, index) if isinstance(table, dict) else None,
            index >= count - shared,
        )
        for index in range(count)
    ]


def _chosen_layers(hf_config: dict[str, Any], count: int, fewest: int = _KEEP_LAYERS) -> list[int]:
    """Returns the first layers of each kind, and as many of the first ones beside them as make up the least number."""
    kinds: dict[str, list[int]] = {}
    for index, kind in enumerate(_kinds(hf_config, count)):
        kinds.setdefault(repr(kind), []).append(index)
    each = 2 if 1 < len(kinds) <= _MOST_PAIRS else 1
    chosen = {index for found in kinds.values() for index in found[:each]}
    for index in range(count):
        if len(chosen) >= min(fewest, count):
            break
        chosen.add(index)
    return sorted(chosen)
