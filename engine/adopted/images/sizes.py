"""Small towers of the same make: the sizes of what makes features of images, kept consistent with each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isqrt
from typing import Any

TOWER_SIZES: dict[str, int] = {
    "attention_heads": 4,
    "base_channels": 32,
    "d_ff": 48,
    "depth": 4,
    "embed_dim": 64,
    "encoder_hidden_size": 64,
    "head_dim": 16,
    "hidden_size": 64,
    "image_size": 16,
    "init_image_size": 16,
    "intermediate_size": 48,
    "latent_channels": 32,
    "max_image_size": 32,
    "max_img_size": 32,
    "max_patches": 64,
    "max_position_embeddings": 64,
    "mlp_dim": 48,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "num_embeddings": 64,
    "num_experts_per_tok": 2,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_patches": 16,
    "num_position_embeddings": 64,
    "num_query_tokens": 4,
    "num_pos_feats": 16,
    "output_channels": 32,
    "out_hidden_size": 64,
    "patch_embed_hidden_size": 48,
    "patch_size": 4,
    "pos_emb_height": 8,
    "pos_emb_width": 8,
    "position_embedding_size": 64,
    "posemb_grid_size": 8,
    "projection_dim": 64,
    "projection_hidden_dim": 48,
    "projection_intermediate_size": 48,
    "projector_input_dim": 64,
    "projector_output_dim": 64,
    "qformer_hidden_size": 64,
    "resampler_depth": 1,
    "resampler_head_dim": 16,
    "resampler_n_heads": 2,
    "resampler_n_latents": 4,
    "text_hidden_size": 64,
    "vision_output_dim": 64,
    "vocab_size": 64,
    "window_size": 2,
}
"""Keys of the config of a tower, or of what is behind it, and what a small one has."""
PROJECTOR_SIZES: dict[str, int] = {
    "alignment_intermediate_size": 48,
    "image_text_hidden_size": 32,
    "mm_tokens_per_image": 4,
    "num_query_tokens": 4,
    "projection_hidden_size": 64,
    "projector_hidden_size": 48,
}
"""The same of a config with a tower, of what is between the tower and the text."""
TOWERS = (
    "adapter_config",
    "encoder_config",
    "high_res_vision_config",
    "perceiver_config",
    "qformer_config",
    "sam_config",
    "vision_config",
    "vq_config",
)
"""Keys of a `config.json` behind which the configs of towers are."""
_WINDOWS = ("fullatt_block_indexes", "global_attn_indexes")
"""Lists of layers without windows."""
_DEEP = ("deepstack_visual_indexes", "intermediate_layers_indices")
"""Lists of layers whose outputs go to layers of the text, one after the other."""
_TAKEN = ("vision_feature_layer", "vision_feature_layers")
"""Layers whose outputs are taken, from either end."""

Sizes = Mapping[str, Any]
Relations = tuple[tuple[str, Callable[[Sizes], Any]], ...]
"""Keys and how each follows from others, in some families."""


def relate(relations: Relations, full: Sizes, small: dict[str, Any], beside: tuple[Sizes, Sizes] | None = None) -> None:
    """Makes what holds of a config hold of the small one.

    Args:
        full: the config.
        small: the small one, which is changed.
        beside: all sizes that those of the two follow from; None for their own.
    """
    sizes, small_sizes = beside or (full, small)
    for key, relation in relations:
        try:
            if full.get(key) is not None and full[key] == relation(sizes):
                small[key] = int(relation(small_sizes))
        except (KeyError, TypeError, ZeroDivisionError):  # a family without the other sizes
            continue


def small_size(key: str, value: Any, sizes: Sizes) -> Any:
    """Returns what a small tower has under a key; a list has the same for each of its numbers."""
    if isinstance(value, list) and key in ("image_size", "patch_size"):
        return [sizes[key]] * len(value)
    return value


def relate_tower(full: Sizes, small: dict[str, Any]) -> None:
    """Makes sizes of a small tower fit each other, as those of the whole tower do."""
    for key in _WINDOWS:
        if isinstance(full.get(key), list):
            small[key] = [1, 3]
    for key in _DEEP:
        if isinstance(found := full.get(key), list):
            small[key] = list(range(min(len(found), TOWER_SIZES["depth"])))
    if "insert_layer_id" in full:
        small["insert_layer_id"] = 1
    if isinstance(channels := full.get("downsample_channels"), list):
        small["downsample_channels"] = [TOWER_SIZES["hidden_size"]] * len(channels)
    if isinstance(first := small.get("sam_config"), dict):  # makes a fourth as many patches of each side
        first["image_size"] = 4 * TOWER_SIZES["image_size"]
    relate(_TOWER_RELATIONS, full, small)
    if full.get("num_key_value_heads") == full.get("num_attention_heads"):
        small["num_key_value_heads"] = small.get("num_attention_heads")
    patch, window = full.get("patch_size"), full.get("window_size")
    if isinstance(patch, int) and isinstance(window, int) and window % patch == 0:  # of pixels, and not of patches
        small["window_size"] = 4 * small["patch_size"]


def relate_parts(full: Sizes, small: dict[str, Any]) -> None:
    """Makes sizes of the parts of a small model of images and text fit each other, as those of the whole model do."""
    for key in _TAKEN:
        for config in (small, *(one for name in TOWERS if isinstance(one := small.get(name), dict))):
            if isinstance(found := config.get(key), list):
                config[key] = _taken(found)
            elif isinstance(found, int) and found > 0:
                config[key] = 1
    for key, size in PROJECTOR_SIZES.items():
        if isinstance(full.get(key), int):
            small[key] = min(full[key], size)
    inside = [key for key, one in full.items() if isinstance(one, dict) and "config" in key and key != "text_config"]
    whole, parts = [full[key] for key in inside], [small[key] for key in inside]
    tower, small_tower = full.get("vision_config") or {}, small.get("vision_config") or {}
    text, small_text = full.get("text_config") or {}, small.get("text_config") or {}
    for one, small_one in ((full, small), *zip(whole, parts, strict=True)):
        for key in _OF_TEXT:
            if one.get(key) is not None and one[key] == text.get("hidden_size"):
                small_one[key] = small_text["hidden_size"]
        for key in _OF_TOWER if one is not tower else ():
            if one.get(key) is not None and one[key] == tower.get("hidden_size"):
                small_one[key] = small_tower["hidden_size"]
    if tower and small_tower:
        relate(_PART_RELATIONS, full, small, (_both(tower, full), _both(small_tower, small)))
        if isinstance(full.get("image_grid_pinpoints"), list) and "image_size" in tower:
            scale = tower["image_size"] // small_tower["image_size"]
            small["image_grid_pinpoints"] = [[side // scale for side in one] for one in full["image_grid_pinpoints"]]
        if "projector_patch_to_query_dict" in full:
            small["projector_patch_to_query_dict"] = {str(_side(small_tower) ** 2): 4}
            small["max_value_projector_patch_to_query_dict"] = 4
        if isinstance(pairs := full.get("deepstack_layer_map"), list):
            small["deepstack_layer_map"] = [[tower_layer, place] for place, (tower_layer, _) in enumerate(pairs)]
            small["spatial_target_layers"] = list(range(len(full.get("spatial_target_layers") or ())))
        if isinstance(rate := full.get("downsample_rate"), str):  # of queries and features of a side of a window
            queries, features = map(int, rate.split("/"))
            small["downsample_rate"] = f"{4 * queries // features}/4"


def features_of_layers(config: Sizes) -> int:
    """Returns how many of a tower's layers give features to layers of the text, one to each."""
    parts = [one for name in TOWERS if isinstance(one := config.get(name), dict)]
    return max((len(one.get(key) or ()) for one in parts for key in _DEEP), default=0)


def tower_layers(config: Sizes, tower: Sizes) -> int:
    """Returns how many layers a small tower keeps: few, or as many as others are told of.

    Args:
        config: of the whole model.
        tower: the tower's.
    """
    parts = (config, *(one for name in TOWERS if isinstance(one := config.get(name), dict)))
    taken = [found for part in parts for key in _TAKEN if isinstance(found := part.get(key), list)]
    deep = [found for key in _DEEP if isinstance(found := tower.get(key), list)]
    if any(key in tower for key in _WINDOWS) or "insert_layer_id" in tower or config.get("deepstack_layer_map"):
        return _MOST_LAYERS
    return max(_FEWEST_LAYERS, *(1 + len(found) for found in (*taken, *deep)), 0)


_FEWEST_LAYERS, _MOST_LAYERS = 2, TOWER_SIZES["depth"]


def _both(tower: Sizes, config: Sizes) -> Sizes:
    return {**tower, **config, "tower_hidden_size": tower.get("hidden_size")}


def _taken(layers: list[int]) -> list[int]:
    """Returns as many layers of a small tower, each from the end that it was counted from."""
    behind = sorted((one for one in layers if one < 0), reverse=True)
    front = sorted(one for one in layers if one >= 0)
    first = min(-behind[0], 2) if behind else 0
    return [-(first + behind.index(one)) if one < 0 else 1 + front.index(one) for one in layers]


_OF_TEXT = (
    "hidden_size",
    "out_hidden_size",
    "text_hidden_size",
    "projection_dim",
    "projector_hidden_size",
    "adapter_out_dim",
)
"""Keys that are the text's hidden size in some families."""
_OF_TOWER = ("hidden_size", "vision_hidden_size", "encoder_hidden_size", "projection_hidden_size")
"""Keys that are the tower's hidden size in some families."""


def _side(sizes: Sizes) -> int:
    image, patch = (one[0] if isinstance(one, list) else one for one in (sizes["image_size"], sizes["patch_size"]))
    return int(image // patch)


_TOWER_RELATIONS: Relations = (
    ("num_position_embeddings", lambda c: _side(c) ** 2),
    ("num_image_tokens", lambda c: _side(c) ** 2),
    ("num_patches", lambda c: _side(c)),
    ("adapter_in_dim", lambda c: c["hidden_size"]),
    ("projector_input_dim", lambda c: c["projector_output_dim"]),
    ("vision_output_dim", lambda c: c["projector_output_dim"]),
    ("intermediate_size", lambda c: c["hidden_size"] / c["pixel_shuffle_ratio"] ** 2),
    ("patch_dim", lambda c: 3 * c["patch_size"] ** 2),
    ("video_patch_dim", lambda c: 3 * c["video_temporal_patch_size"] * c["patch_size"] ** 2),
    ("max_position_embeddings", lambda c: c["pos_emb_height"] * c["pos_emb_width"]),
    ("position_embedding_size", lambda c: isqrt(c["position_embedding_size"]) ** 2),
)
_PART_RELATIONS: Relations = (
    ("merged_hidden_size", lambda c: c["projector_hidden_size"] * c["spatial_merge_size"] ** 2),
    ("out_hidden_size", lambda c: c["tower_hidden_size"] * c["merge_size"] ** 2),
)
"""Sizes that follow from others in some families: what holds of a config is made to hold of the small one."""


def distinct_tokens(full: Sizes, small: dict[str, Any], vocabulary: int) -> None:
    """Gives the tokens of images of a small model ids of its vocabulary, each its own.

    Args:
        vocabulary: of the small model.
    """
    places: dict[int, int] = {}
    for key, value in full.items():
        for one in value if isinstance(value, list) and key.endswith("_token_ids") else [value]:
            if _is_token(key) and isinstance(one, int) and not isinstance(one, bool) and one >= vocabulary:
                places.setdefault(one, vocabulary - 2 - len(places))
    for key, value in full.items():
        if _is_token(key) and isinstance(value, list):
            small[key] = [places.get(one, one) for one in value]
        elif _is_token(key) and isinstance(value, int):
            small[key] = places.get(value, value)


def _is_token(key: str) -> bool:
    return key.endswith(("_token_id", "_token_index", "_token_ids", "_id")) and "layer" not in key
