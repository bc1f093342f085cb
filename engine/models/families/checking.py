"""Checks that the values of a `config.json` have the types that families read, before any family reads one.

Only keys that are present are checked: which keys a family needs, and what they mean, the family itself knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from engine.errors import UserError
from engine.sentences import as_written
from engine.size_limits import MOST_EXPERT_STACKS, MOST_LAYERS

_MOST = 2**31 - 1


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_list_of(value: object, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(fits, value))


_COUNTS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "max_position_embeddings", "sliding_window", "no_rope_layer_interval", "sliding_window_pattern",
    "original_max_position_embeddings", "dim_model_base", "num_multi_query_heads",
    "cross_hidden_size", "cross_compute_hidden_size", "cross_image_size", "n_group", "topk_group",
    "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "q_lora_rank", "linear_conv_kernel_dim",
    "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads",
    "full_attention_interval", "rotary_dim", "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv",
    "mamba_expand", "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel",
    "shared_intermediate_size", "moe_shared_expert_intermediate_size",
    "index_topk", "index_head_dim", "index_n_heads", "index_topk_freq",
    "mamba_d_ssm", "conv_L_cache", "block_ff_dim", "block_multiple_of", "linear_head_dim",
    "linear_num_heads", "global_head_dim", "num_global_key_value_heads", "moe_layer_interval", "moe_latent_size",
    "vocab_size_per_layer_input",
)  # fmt: skip
_FACTORS = (
    "rms_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar", "attn_logit_softcapping",
    "final_logit_softcapping", "logits_scaling", "embedding_multiplier", "attention_multiplier", "residual_multiplier",
    "scale_emb", "scale_depth", "initializer_range", "routed_scaling_factor",
    "swiglu_alpha", "swiglu_limit", "layer_norm_epsilon", "time_step_min",
    "norm_eps", "block_ffn_dim_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier",
    "attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier", "moe_norm_min",
)  # fmt: skip
_SWITCHES = (
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "use_bias",
    "attention_out_bias",
    "use_sliding_window",
    "qkv_bias",
    "norm_topk_prob",
    "output_router_logits",
    "use_qk_norm",
    "rope_interleave",
    "conv_bias",
    "tie_embedding",
    "use_expert_bias",
    "block_auto_adjust_ff_dim",
    "linear_allow_neg_eigval",
    "attention_k_eq_v",
    "enable_moe_block",
    "moe_renormalize",
    "use_double_wide_mlp",
)
_EXPERTS = (
    "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size",
    "shared_expert_intermediate_size", "decoder_sparse_step", "n_routed_experts", "n_shared_experts",
    "first_k_dense_replace", "num_nextn_predict_layers", "num_dense_layers", "top_k_experts",
    "moe_k", "moe_topk", "moe_num_experts", "moe_num_shared_experts", "moe_layer_start_index",
    "num_kv_shared_layers", "hidden_size_per_layer_input",
)  # fmt: skip
"""Counts of a mixture of experts, or of what few models have; configs of models without it may have them as 0."""
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TEXTS = ("hidden_act", "hidden_activation")
_MAPPINGS = ("rope_scaling", "rope_parameters", "quantization_config", "per_layer_config")

Kind = tuple[str, Callable[[Any], bool]]
_FACTOR_LISTS = {"mlp_multipliers": 2, "ssm_multipliers": 5}
"""Lists of factors, and how many they have."""

_COUNT: Kind = ("a whole number above 0", lambda value: _is_whole(value) and 0 < value <= _MOST)
_FACTOR: Kind = ("a number above 0", lambda value: _is_number(value) and value > 0)
_SHARE: Kind = ("a number above 0, at most 1", lambda value: _is_number(value) and 0 < value <= 1)
_SWITCH: Kind = ("true or false", lambda value: isinstance(value, bool))


def _factors(count: int) -> Kind:
    """Returns the kind of a list of so many factors."""
    return f"{count} numbers above 0", lambda value: _is_list_of(value, _FACTOR[1]) and len(value) == count


_KINDS: dict[str, Kind] = {
    **dict.fromkeys(_COUNTS, _COUNT),
    **dict.fromkeys(_FACTORS, _FACTOR),
    **dict.fromkeys(_SWITCHES, _SWITCH),
    **dict.fromkeys(_TEXTS, ("text", lambda value: isinstance(value, str))),
    **dict.fromkeys(_MAPPINGS, ("a mapping", lambda value: isinstance(value, dict))),
    "num_hidden_layers": (
        f"a whole number from 1 to {MOST_LAYERS}",
        lambda value: _is_whole(value) and 0 < value <= MOST_LAYERS,
    ),
    **dict.fromkeys(_EXPERTS, ("a whole number, 0 or more", lambda value: _is_whole(value) and 0 <= value <= _MOST)),
    **{key: _factors(count) for key, count in _FACTOR_LISTS.items()},
    "partial_rotary_factor": _SHARE,
    "router_aux_loss_coef": ("a number, 0 or more", lambda value: _is_number(value) and value >= 0),
    "moe_layer_end_index": ("a whole number, -1 or more", lambda value: _is_whole(value) and value >= -1),
    "max_window_layers": ("a whole number, 0 or more", lambda value: _is_whole(value) and value >= 0),
    "full_attn_idxs": ("a list of whole numbers", lambda value: _is_list_of(value, _is_whole)),
    "mlp_only_layers": ("a list of whole numbers", lambda value: _is_list_of(value, _is_whole)),
    "mlp_layer_types": ("a list of texts", lambda value: _is_list_of(value, lambda item: isinstance(item, str))),
    "layer_types": ("a list of texts", lambda value: _is_list_of(value, lambda item: isinstance(item, str))),
    "no_rope_layers": ("a list of 0 and 1", lambda value: _is_list_of(value, lambda item: item in (0, 1))),
}
_ROPE_KEYS = ("factor", "alpha", "low_freq_factor", "high_freq_factor", "rope_theta")
_NULLABLE_ROPE_KEYS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
_ROPE_KINDS = ("full_attention", "sliding_attention")
"""Kinds of layers that may have a rotary embedding each."""
_SECOND_SCALES = ("mscale", "mscale_all_dim")
"""YaRN's keys where 0 means none."""
_MAY_LACK_ROPE = ("olmo_hybrid",)
"""Types whose rope_theta null means no rotary embedding."""
_COUNT_BY_LAYER = ("hunyuan_v1_moe",)
"""Types whose counts of experts may be lists, of one for each layer."""
_NEVER_NULL = (
    "rms_norm_eps", "query_pre_attn_scalar", "logits_scaling", "embedding_multiplier", "attention_multiplier",
    "residual_multiplier", "scale_emb", "scale_depth", "dim_model_base", "no_rope_layer_interval",
    "sliding_window_pattern", "max_position_embeddings",
)  # fmt: skip


def part_of(hf: Mapping[str, Any], key: str) -> dict[str, Any] | None:
    """Returns the config inside a config; None where there is none.

    Raises:
        UserError: there is something else.
    """
    part = hf.get(key)
    if part is not None and not isinstance(part, dict):
        raise _wrong(key, part, "a mapping")
    return part or None


def check_kinds(hf: Mapping[str, Any]) -> None:
    """Checks every value that some family reads.

    Raises:
        UserError: one is of another kind or out of range, or the sizes of heads do not fit each other.
    """
    for key, (expected, fits) in _KINDS.items():
        value = hf.get(key)
        if key == "sliding_window" and value == 0 and hf.get("use_sliding_window") is False:
            continue  # as transformers writes it for Qwen2-MoE
        if key == "sliding_window_pattern" and hf.get("layer_types"):
            continue  # EXAONE 4 has a text or null there
        if isinstance(value, list) and key in _EXPERTS and hf.get("model_type") in _COUNT_BY_LAYER:
            if not all(map(fits, value)) or not value:
                raise _wrong(key, value, f"{expected}, or a list of these")
            continue
        needed = key in _NEVER_NULL or (key == "max_window_layers" and hf.get("use_sliding_window"))
        if (value is not None and not fits(value)) or (value is None and key in hf and needed):
            raise _wrong(key, value, expected)
    for key in ("rope_scaling", "rope_parameters"):
        rope = hf.get(key) or {}
        if hf.get("model_type") in _MAY_LACK_ROPE:
            rope = {name: value for name, value in rope.items() if name != "rope_theta" or value is not None}
        _check_rope(key, rope)
    heads, groups = hf.get("num_attention_heads"), hf.get("num_key_value_heads")
    if heads and groups and heads % groups:
        raise UserError(
            f"config.json has {heads} num_attention_heads and {groups} num_key_value_heads, but each key head serves "
            "equally many heads: correct it or copy it again."
        )
    experts = max(_largest(hf.get(key)) for key in _EXPERT_COUNTS)
    if (stacks := experts * (hf.get("num_hidden_layers") or 0)) > MOST_EXPERT_STACKS:
        raise UserError(
            f"config.json has {experts} experts in each of {hf['num_hidden_layers']} layers, {stacks:,} in all, but at "
            f"most {MOST_EXPERT_STACKS:,} are expected: correct it or copy it again."
        )
    hidden, size = hf.get("hidden_size"), hf.get("head_dim")
    latent = hf.get("kv_lora_rank") or hf.get("qk_nope_head_dim")  # whose heads have sizes of their own
    if size is None and hidden and heads and hidden % heads and not latent:
        raise UserError(
            f"config.json has hidden_size {hidden}, which does not divide into {heads} num_attention_heads, and no "
            "head_dim: correct it or copy it again."
        )


def _largest(count: int | list[int] | None) -> int:
    return max(count) if isinstance(count, list) else count or 0


def _check_rope(key: str, rope: Mapping[str, Any]) -> None:
    for name, value in rope.items():
        place = f"{key}.{name}"
        if name in _ROPE_KINDS:
            if value is not None and not isinstance(value, dict):
                raise _wrong(place, value, "a mapping")
            _check_rope(place, value or {})
        elif (name in _NULLABLE_ROPE_KEYS and value is None) or (name in _SECOND_SCALES and value == 0):
            continue
        elif name in _ROPE_KEYS + _NULLABLE_ROPE_KEYS and not _FACTOR[1](value):
            raise _wrong(place, value, _FACTOR[0])
        elif name == "llama_4_scaling_beta" and not (_is_number(value) and value >= 0):
            raise _wrong(place, value, "a number, 0 or more")
        elif name == "partial_rotary_factor" and value is not None and not _SHARE[1](value):
            raise _wrong(place, value, _SHARE[0])
        elif name == "original_max_position_embeddings" and not _COUNT[1](value):
            raise _wrong(place, value, _COUNT[0])
        elif name in ("rope_type", "type") and not isinstance(value, str):
            raise _wrong(place, value, "text")
        elif name in ("short_factor", "long_factor") and not _is_list_of(value, _FACTOR[1]):
            raise _wrong(place, value, "a list of numbers above 0")


def rope_value(rope: Mapping[str, Any], kind: str, key: str) -> Any:
    """Returns a value that a rotary embedding of this kind needs.

    Raises:
        UserError: it is missing.
    """
    if rope.get(key) is None:
        raise UserError(
            f"config.json has a rotary embedding of type {kind} without {key}: correct it or copy it again."
        )
    return rope[key]


def _wrong(key: str, value: object, expected: str) -> UserError:
    return UserError(
        f"config.json has {key} {as_written(value)}, but {expected} is expected: correct it or copy it again."
    )
