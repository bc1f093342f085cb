"""The upper limits of sizes in a model's configuration files, checked before anything of such a size is made.

They are several times the sizes of released models. A number beyond is a slip or an attack, and a model of it would
take the memory of the machine, or minutes, before its weights could be seen not to fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from engine.errors import UserError

MOST_LAYERS = 1000
"""Every layer costs time to describe."""
MOST_EXPERT_STACKS = 1 << 16
"""Experts of all layers together: each has tensors of its own, which take time to describe. Kimi K2 has 23,424."""

_LIMITS: dict[str, int] = {
    **dict.fromkeys(
        (
            "num_hidden_layers", "depth", "depth_in_timm", "layers_in_checkpoint", "layers_run",
            "num_nextn_predict_layers", "first_k_dense_replace", "num_dense_layers",
        ),
        MOST_LAYERS,
    ),
    **dict.fromkeys(
        (
            "hidden_size", "embed_dim", "out_hidden_size", "mm_hidden_size", "cross_hidden_size",
            "cross_compute_hidden_size", "dim_model_base", "kv_lora_rank", "q_lora_rank", "head_out", "moe_latent_size",
        ),
        1 << 17,
    ),
    **dict.fromkeys(
        (
            "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "mlp_hidden",
            "block_ff_dim", "block_multiple_of",
        ),
        1 << 20,
    ),
    "block_ffn_dim_multiplier": 1 << 6,
    **dict.fromkeys(
        (
            "num_attention_heads", "num_key_value_heads", "num_multi_query_heads", "num_heads", "head_dim",
            "head_width", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "num_experts", "num_local_experts",
            "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group",
            "moe_k", "moe_topk", "moe_num_experts", "moe_num_shared_experts",
            "conv_L_cache", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim",
            "linear_num_key_heads", "linear_num_value_heads", "linear_head_dim", "linear_num_heads",
            "global_head_dim", "num_global_key_value_heads",
        ),
        1 << 12,
    ),
    **dict.fromkeys(
        (
            "image_size", "img_size", "cross_image_size", "patch_size", "temporal_patch_size", "spatial_merge_size",
            "merge_size", "window_size", "scale_resolution", "pt_hw_seq_len", "pos_grid", "crop_size", "size",
            "height", "width", "image_grid_pinpoints", "in_channels", "num_channels",
        ),
        1 << 12,
    ),
    **dict.fromkeys(("query_num", "num_query", "mm_tokens_per_image"), 1 << 14),
    **dict.fromkeys(("max_slice_nums", "max_patches", "min_patches"), 1 << 10),
    **dict.fromkeys(("shortest_edge", "min_pixels"), 1 << 22),  # of Qwen's, pixels of a whole image
    **dict.fromkeys(("num_positions", "num_position_embeddings", "vocab_size"), 1 << 24),
}  # fmt: skip
"""Key -> the largest number below it, whichever part of the file it stands in."""


def check_sizes(part: Mapping[str, Any], file: str = "config.json") -> None:
    """Checks every size of a configuration, in nested mappings and lists too.

    Args:
        part: what the file holds.
        file: its name, for messages.

    Raises:
        UserError: one is larger than its limit.
    """
    for place, value, limit in _sizes(part, "", None):
        if value > limit:
            shown = value if value < 10**20 else "with a number of many digits"
            raise UserError(
                f"{file} has {place} {shown}, but at most {limit:,} is expected: correct it or copy it again."
            )


def _sizes(value: object, place: str, limit: int | None) -> Iterator[tuple[str, int | float, int]]:
    """Yields the numbers with a limit, each with its place."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _sizes(item, f"{place}.{key}" if place else str(key), _LIMITS.get(key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _sizes(item, f"{place}[{number}]", limit)
    elif isinstance(value, int | float) and limit is not None:
        yield place, value, limit
