"""Gemma 4's language models: five layers with a window to one without, whose heads are wider and, in most models, have
no values but their keys; norms on both sides of attention and MLP; and a number that ends each layer. One has experts
beside its MLPs.

The small models (E2B, E4B) have an input of its own for each layer, and last layers that read the keys and values of
earlier ones.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

from engine.errors import UserError
from engine.experts.families.routed import routed_sizes
from engine.gemma4.decoder import SharingConfig
from engine.gemma4.experts import SideExperts
from engine.gemma4.heads import NormedValues
from engine.gemma4.layer_scalar import LayerScalars
from engine.gemma4.per_layer import (
    GATE,
    LAYER_PROJECTION,
    NORM,
    OUTPUT_NORM,
    PROJECTION,
    TABLE,
    PerLayerInputs,
)
from engine.gemma4.sharing import KeySources, SharedKeys, WideMLPs
from engine.models.decoder_config import DecoderConfig
from engine.models.families.family import Family
from engine.models.families.reading import (
    BOTH_NORMS_MODULES,
    check_activation,
    check_required,
    decoder_config,
    filled,
    rope_from_hf,
    windows_from_hf,
)
from engine.models.layer_records import PLAIN_LAYER, Multipliers
from engine.models.names import LAYER_SCALAR, NameMap
from engine.models.ropes import Rope, RopeScaling
from engine.models.stacked_parts import stacked

_PER_LAYER = (GATE, LAYER_PROJECTION, OUTPUT_NORM)
NAMES = NameMap(layer_modules={**BOTH_NORMS_MODULES, LAYER_SCALAR: LAYER_SCALAR}, parameters=(LAYER_SCALAR,))
TEXT_NAMES = NameMap(
    layer_modules={
        **NAMES.layer_modules,
        **{name: name for name in _PER_LAYER},
        "mlp.router": "router.proj",
        **stacked("experts"),
        "mlp.dense_output_norm": "post_feedforward_layernorm_1",
        "mlp.experts_output_norm": "post_feedforward_layernorm_2",
        "mlp.experts_input_norm": "pre_feedforward_layernorm_2",
    },
    parameters=NAMES.parameters,
    ends={name: name for name in (TABLE, PROJECTION, NORM)},
    tensors={f"mlp.router.{name}": f"router.{name}" for name in ("scale", "per_expert_scale")},
)

_SHARED = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "attention_k_eq_v": False, "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
}  # fmt: skip
_DEFAULTS = {
    "gemma4_text": {
        **_SHARED, "sliding_window": 512, "max_position_embeddings": 131_072, "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144, "enable_moe_block": False,
    },
    "gemma4_unified_text": {**_SHARED, "sliding_window": 1024, "max_position_embeddings": 262_144},
}  # fmt: skip
_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


_OF_KEYS = ("k_proj", "v_proj", "k_norm", "v_norm")


def _filled(hf: Mapping[str, Any], family: str) -> dict[str, Any]:
    return filled(hf, _DEFAULTS[family])


def _types(hf: Mapping[str, Any]) -> list[str]:
    """Returns the type of each layer; the last one sees all tokens, whatever the config says."""
    count = int(hf["num_hidden_layers"])
    types = hf.get("layer_types") or [
        "full_attention" if index % 6 == 5 else "sliding_attention" for index in range(count)
    ]
    return [*types[:-1], "full_attention"]


def _are_counts(sizes: object) -> bool:
    return isinstance(sizes, dict) and all(type(value) is int and value > 0 for value in sizes.values())


def _global_sizes(hf: Mapping[str, Any], layers: tuple[int, ...]) -> tuple[int, int]:
    """Returns key/value heads and head dimension of the layers that see all tokens."""
    usual = {"num_key_value_heads": hf["num_key_value_heads"], "head_dim": hf["head_dim"]}
    per_layer = hf.get("per_layer_config")
    if per_layer is None:
        keys = hf.get("num_global_key_value_heads") if hf["attention_k_eq_v"] else None
        return int(keys or hf["num_key_value_heads"]), int(hf.get("global_head_dim", 512))
    own = {int(index): one for index, one in per_layer.items() if index.isdecimal()}  # transformers writes 05
    found = (own.get(index, {}) for index in range(int(hf["num_hidden_layers"])))
    sizes = [{**usual, **one} if _are_counts(one) else {} for one in found]
    wide = sizes[layers[0]]
    if not wide or any(one != (wide if index in layers else usual) for index, one in enumerate(sizes)):
        raise UserError(
            "config.json has a per_layer_config with other sizes than head_dim and num_key_value_heads, or with sizes "
            "that differ between layers of one type, which the decoder does not have: use model.implementation auto."
        )
    return int(wide["num_key_value_heads"]), int(wide["head_dim"])


def _rope(part: Mapping[str, Any], dim: int) -> Rope:
    """Returns the rotary embedding of heads of `dim` features."""
    if part.get("rope_type") != "proportional":
        theta, scaling = rope_from_hf({"rope_parameters": part})
        return Rope(theta=theta, scaling=scaling, width=dim)
    factor = float(part.get("factor", 1.0))
    return Rope(
        theta=float(part["rope_theta"]),
        scaling=None if factor == 1.0 else RopeScaling(kind="linear", factor=factor),
        width=dim,
        turned_pairs=int(float(part.get("partial_rotary_factor") or 1.0) * dim // 2),
    )


def _experts(hf: Mapping[str, Any]) -> tuple[SideExperts, ...]:
    """Returns the experts beside the MLPs; none where the model has none.

    Raises:
        UserError: their sizes are missing, or do not fit each other.
    """
    if not hf.get("enable_moe_block"):
        return ()
    if missing := [key for key in ("num_experts", "top_k_experts", "moe_intermediate_size") if not hf.get(key)]:
        raise UserError(
            f"config.json has enable_moe_block true and no {missing[0]}: the config of a Gemma 4 with experts has it."
        )
    sizes = routed_sizes(
        {**hf, "num_experts_per_tok": hf["top_k_experts"]},
        usual=0,
        intermediate=int(hf["moe_intermediate_size"]),
        renormalises=True,
        rounds=False,
        rule={"input_factor": float(hf["hidden_size"]) ** -0.5, "scales_experts": True},
        activation="gelu_tanh",
    )
    return (SideExperts(**{field.name: getattr(sizes, field.name) for field in fields(sizes)}),)


def config_from_hf(hf: dict[str, Any], *, family: str) -> DecoderConfig:
    """Reads a Gemma 4 text `config.json`, or the `text_config` of one with images.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    hf = _filled(hf, family)
    check_required(hf, family)
    check_activation(hf, "hidden_activation", "gelu_pytorch_tanh")
    if hf.get("use_bidirectional_attention") == "all":
        raise UserError(
            f"config.json has use_bidirectional_attention all in a {family} model, and the decoder's attention is "
            "causal: use a generative model."
        )
    types = _types(hf)
    kinds = windows_from_hf({**hf, "layer_types": types}, types) or (PLAIN_LAYER,) * len(types)
    everywhere = tuple(index for index, kind in enumerate(types) if kind == "full_attention")
    windowed = tuple(index for index in range(len(types)) if index not in everywhere)
    keys, dim = _global_sizes(hf, everywhere)
    if dim % 2:
        raise UserError(
            f"config.json makes heads of {dim} features in layers that see all tokens, which do not pair up to be "
            "rotated: correct global_head_dim."
        )
    if int(hf["num_attention_heads"]) % keys:
        raise UserError(
            f"config.json has {hf['num_attention_heads']} num_attention_heads and {keys} num_global_key_value_heads, "
            "but each key head serves equally many heads: correct it or copy it again."
        )
    usual = int(hf["num_key_value_heads"]), int(hf["head_dim"])
    are_keys = bool(hf["attention_k_eq_v"])
    ropes = {**_ROPES, **{kind: part for kind, part in (hf.get("rope_parameters") or {}).items() if part is not None}}
    shared = _shared_keys(hf, types, {"full_attention": (keys, dim), "sliding_attention": usual})
    reading = {index for one in shared for index in one.layers}
    inputs = _per_layer_inputs(hf, family)
    plain = decoder_config(
        hf,
        family,
        qk_norm=True,
        ropes=(_rope(ropes["full_attention"], dim), _rope(ropes["sliding_attention"], usual[1])),
        layer_kinds=tuple(replace(kind, second_rope=index in windowed) for index, kind in enumerate(kinds)),
        activation="gelu_tanh",
        norms="both",
        multipliers=Multipliers(embedding=math.sqrt(hf["hidden_size"])),
        attention_scale=1.0,
        logits_softcap=hf.get("final_logit_softcapping"),
        variants=(
            NormedValues(
                layers=_without(windowed, reading), num_kv_heads=usual[0], dim=usual[1], are_keys=False, fuses=True
            ),
            NormedValues(
                layers=_without(everywhere, reading),
                num_kv_heads=keys,
                dim=dim,
                are_keys=are_keys,
                fuses=(keys, dim) == usual and not are_keys,
            ),
            *shared,
            *([KeySources(layers=tuple(one.source for one in shared))] if shared else []),
            *_wide_mlps(hf, reading),
            *inputs,
            LayerScalars(),
            *_experts(hf),
        ),
    )
    if not shared and not inputs:
        return plain
    return SharingConfig(**{field.name: getattr(plain, field.name) for field in fields(plain)})


def _without(layers: tuple[int, ...], others: Collection[int]) -> tuple[int, ...]:
    return tuple(index for index in layers if index not in others)


def _shared_keys(
    hf: Mapping[str, Any], types: list[str], sizes: Mapping[str, tuple[int, int]]
) -> tuple[SharedKeys, ...]:
    """Returns the layers that read keys and values of earlier ones, of each type.

    Args:
        sizes: type -> its key/value heads and their features.

    Raises:
        UserError: there is no earlier layer of a type.
    """
    count = int(hf["num_kv_shared_layers"])
    if not count:
        return ()
    first = len(types) - count
    shared = []
    for kind, (keys, dim) in sizes.items():
        layers = tuple(index for index in range(max(first, 0), len(types)) if types[index] == kind)
        sources = [index for index in range(first) if types[index] == kind]
        if layers and not sources:
            raise UserError(
                f"config.json has num_kv_shared_layers {count} of {len(types)} layers, and no earlier layer is of type "
                f"{kind}, whose keys the last ones would read: correct it or copy it again."
            )
        if layers:
            shared.append(
                SharedKeys(layers=layers, num_kv_heads=keys, dim=dim, are_keys=False, fuses=False, source=sources[-1])
            )
    return tuple(shared)


def _wide_mlps(hf: Mapping[str, Any], layers: Collection[int]) -> tuple[WideMLPs, ...]:
    """Returns the MLPs of twice the width, of layers that read others' keys.

    Raises:
        UserError: they have experts beside them.
    """
    if not hf.get("use_double_wide_mlp") or not layers:
        return ()
    if hf.get("enable_moe_block"):
        raise UserError(
            "config.json has use_double_wide_mlp and enable_moe_block true, but the engine's own Gemma 4 has no "
            "experts beside MLPs of twice the width: set model.implementation to adopted."
        )
    return (WideMLPs(layers=tuple(sorted(layers)), intermediate=2 * int(hf["intermediate_size"])),)


def _per_layer_inputs(hf: Mapping[str, Any], family: str) -> tuple[PerLayerInputs, ...]:
    width = int(hf.get("hidden_size_per_layer_input") or 0) if family == "gemma4_text" else 0  # the others ignore it
    return (PerLayerInputs(width=width, vocab_size=int(hf["vocab_size_per_layer_input"])),) if width else ()


def _unused(hf: Mapping[str, Any], family: str) -> tuple[str, ...]:
    """Returns what checkpoints have of the keys and values of layers that read others'; transformers ignores it too."""
    hf = _filled(hf, family)
    layers = int(hf["num_hidden_layers"])
    shared = range(max(0, layers - int(hf["num_kv_shared_layers"])), layers)
    return tuple(f"*layers.{index}.self_attn.{name}.*" for index in shared for name in _OF_KEYS)


def _family(name: str, names: NameMap) -> Family:
    return Family(partial(config_from_hf, family=name), names, unused=partial(_unused, family=name))


TEXT = _family("gemma4_text", TEXT_NAMES)
UNIFIED_TEXT = _family("gemma4_unified_text", NAMES)
