"""The parts of a `config.json` that families read in the same way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.errors import UserError
from engine.models.decoder_config import DecoderConfig
from engine.models.families.checking import rope_value
from engine.models.layer_records import LayerKind
from engine.models.names import NameMap
from engine.models.ropes import Rope, RopeScaling

REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")

PRE_NORM_MODULES = {
    "input_norm": "input_layernorm",
    "attention.q_proj": "self_attn.q_proj",
    "attention.k_proj": "self_attn.k_proj",
    "attention.v_proj": "self_attn.v_proj",
    "attention.o_proj": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "mlp.gate_proj": "mlp.gate_proj",
    "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
}
"""A layer's modules as most families call them."""

BOTH_NORMS_MODULES = {
    **PRE_NORM_MODULES,
    "attention_output_norm": "post_attention_layernorm",
    "post_attention_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
"""Where attention and MLP have a norm on their input and one on their output."""

NAMES = NameMap(layer_modules=PRE_NORM_MODULES)


def rope_from_hf(hf: Mapping[str, Any], *, in_limits: bool = False) -> tuple[float, RopeScaling | None]:
    """Reads rotary base and scaling, from transformers 4's `rope_theta` + `rope_scaling` or 5's `rope_parameters`.

    A length of pretraining beside the mapping counts before the one inside, as in transformers 5.

    Args:
        in_limits: rows end at max_position_embeddings, up to where dynamic scaling changes nothing.

    Raises:
        UserError: the scaling is of a kind that the decoder does not have, lacks a value, or is of parts of heads.
    """
    scaling, kind = _scaling(hf)
    theta = float(scaling.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    if kind == "default":
        return theta, None
    share = scaling.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    if share != 1.0:
        raise UserError(
            f"config.json has partial_rotary_factor {share:g} beside a rotary embedding of type {kind}, which the "
            "decoder has for whole heads alone: use a model without it."
        )
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=float(rope_value(scaling, kind, "factor")))
    if kind == "llama3":
        return theta, RopeScaling(
            kind="llama3",
            factor=float(rope_value(scaling, kind, "factor")),
            low_freq_factor=float(rope_value(scaling, kind, "low_freq_factor")),
            high_freq_factor=float(rope_value(scaling, kind, "high_freq_factor")),
            original_length=original_length(scaling, hf, kind),
        )
    if kind == "yarn":
        return theta, _yarn(scaling, hf)
    if kind == "dynamic" and in_limits:
        rope_value(scaling, kind, "factor")
        return theta, None
    raise UserError(
        f"rope type {kind!r} in config.json is not supported: use a model with default, linear, llama3 or yarn."
    )


def _yarn(scaling: Mapping[str, Any], hf: Mapping[str, Any]) -> RopeScaling:
    """Reads YaRN (arXiv 2309.00071), with the attention factor of DeepSeek's models where the config has its two
    scales."""
    length, factor = original_length(scaling, hf, "yarn"), scaling.get("factor")
    if factor is None:
        factor = int(rope_value(hf, "yarn", "max_position_embeddings")) / length

    def attention_factor(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    table_scale, scales = scaling.get("attention_factor"), (scaling.get("mscale"), scaling.get("mscale_all_dim"))
    if table_scale is None:
        table_scale = attention_factor(1.0)
        if scales[0] and scales[1]:
            table_scale = attention_factor(scales[0]) / attention_factor(scales[1])
    return RopeScaling(
        kind="yarn",
        factor=float(factor),
        low_freq_factor=float(scaling.get("beta_slow") or 1),
        high_freq_factor=float(scaling.get("beta_fast") or 32),
        original_length=length,
        table_scale=float(table_scale),
        whole_pairs=bool(scaling.get("truncate", True)),
    )


def _scaling(hf: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Returns the mapping that scales the rotary embedding, and of which kind it is."""
    scaling = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    return scaling, scaling.get("rope_type", scaling.get("type", "default"))


def original_length(scaling: Mapping[str, Any], hf: Mapping[str, Any], kind: str) -> int:
    """Returns the length of pretraining: the config's own `original_max_position_embeddings`, else the rotary
    embedding's.

    Raises:
        UserError: neither has one.
    """
    key = "original_max_position_embeddings"
    return int(hf[key] if hf.get(key) is not None else rope_value(scaling, kind, key))


def rotating_part(config: DecoderConfig, hf: Mapping[str, Any], *, usual: float = 1.0) -> DecoderConfig:
    """Returns the config with as many features of each head rotated as `partial_rotary_factor` says.

    Args:
        usual: the factor where the config has none.

    Raises:
        UserError: they are not pairs.
    """
    scaling, _ = _scaling(hf)
    given = (part.get("partial_rotary_factor") for part in (scaling, hf))
    share = float(next((value for value in given if value is not None), usual))
    if (rotary_dim := int(config.head_dim * share)) == config.head_dim:
        return config
    if rotary_dim % 2:
        raise UserError(
            f"config.json rotates {rotary_dim} of {config.head_dim} features, which are not pairs: "
            "expected a partial_rotary_factor that leaves an even number."
        )
    return replace(config, rotary_dim=rotary_dim)


def without_share(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config without `partial_rotary_factor`, for a family whose rotary embedding, of whichever kind, is of
    parts of heads: `rotating_part` reads them."""
    key = "partial_rotary_factor"
    found = {name: value for name, value in hf.items() if name != key}
    for name in ("rope_scaling", "rope_parameters"):
        if found.get(name):
            found[name] = {inner: value for inner, value in found[name].items() if inner != key}
    return found


def checked_sections(sections: object) -> list[int]:
    """Returns how many pairs of features turn by time, height and width, as a config has them.

    Raises:
        UserError: the three numbers are something else.
    """
    if (
        not isinstance(sections, list)
        or len(sections) != 3
        or not all(type(one) is int and one >= 0 for one in sections)
    ):
        raise UserError(
            f"config.json has mrope_section {sections!r}, but three numbers of pairs that turn by time, height and "
            "width are expected: correct it or copy it again."
        )
    return sections


def axes_in_turns(pairs: int, sections: list[int]) -> tuple[int, ...]:
    """Returns the axis that each pair of features turns by, `Rope.axes`: every third one, as far as there are enough of
    them, by height and by width, and the others by time."""
    axes = [0] * pairs
    for axis in (1, 2):
        for pair in range(axis, min(3 * sections[axis], pairs), 3):
            axes[pair] = axis
    return tuple(axes)


def filled(hf: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config with its family's defaults for what it leaves out, or has as null."""
    return {**defaults, **{key: value for key, value in hf.items() if value is not None}}


def check_layer_types(hf: Mapping[str, Any], types: Sequence[str], known: Sequence[str]) -> None:
    """Checks the types of a model's layers.

    Raises:
        UserError: there are others than the known ones, or not one for each layer.
    """
    if strange := sorted(set(types) - set(known)):
        raise UserError(
            f"config.json has layers of type {strange[0]!r} in a {hf.get('model_type')} model, which the decoder does "
            f"not have: use a model with {', '.join(known[:-1])} and {known[-1]} layers alone."
        )
    if len(types) != int(hf["num_hidden_layers"]):
        raise UserError(
            f"config.json has {len(types)} layer_types for {hf['num_hidden_layers']} layers: expected one for each, "
            "correct it."
        )


def windows_from_hf(hf: Mapping[str, Any], types: list[str]) -> tuple[LayerKind, ...]:
    """Returns a kind for each layer of `layer_types`, or of `types` where the config does not say.

    Raises:
        UserError: there are other kinds of layers, or not one for each layer.
    """
    types = hf.get("layer_types") or types
    check_layer_types(hf, types, ("full_attention", "sliding_attention"))
    window = hf.get("sliding_window")
    if window is None or "sliding_attention" not in types:
        return ()
    return tuple(LayerKind(window=int(window) if kind == "sliding_attention" else None) for kind in types)


def check_activation(hf: Mapping[str, Any], key: str, expected: str) -> None:
    """Raises UserError where the MLP's activation is another one than the family's."""
    if (activation := hf.get(key) or expected) != expected:
        raise UserError(
            f"config.json has {key} {activation!r}, but the MLP of a {hf.get('model_type')} model has {expected!r} "
            "here: use a model with that."
        )


def check_required(hf: Mapping[str, Any], family: str) -> None:
    """Raises UserError where a size is missing."""
    if missing := [key for key in REQUIRED if hf.get(key) is None]:
        raise UserError(f"config.json lacks {', '.join(missing)}: the config of a {family} model has them all.")


def decoder_config(hf: Mapping[str, Any], family: str, **more: Any) -> DecoderConfig:
    """Reads a decoder with Llama's keys.

    Args:
        hf: the config, with the family's defaults for what it may leave out.
        family: key of the family table.
        more: fields that the family sets otherwise, or that Llama does not have.

    Raises:
        UserError: a required key is missing, or the rotary embedding is of an unknown kind.
    """
    check_required(hf, family)
    max_length = int(hf.get("max_position_embeddings", 2048))
    if "ropes" not in more:
        theta, scaling = rope_from_hf(hf, in_limits=True)
        more["ropes"] = (Rope(theta=theta, scaling=scaling),)
        if _scaling(hf)[1] == "dynamic":
            more["max_row_length"] = max_length  # longer rows have other frequencies
    heads = int(hf["num_attention_heads"])
    fields: dict[str, Any] = {
        "family": family,
        "hidden": int(hf["hidden_size"]),
        "intermediate": int(hf["intermediate_size"]),
        "num_layers": int(hf["num_hidden_layers"]),
        "num_heads": heads,
        "num_kv_heads": int(hf.get("num_key_value_heads") or heads),
        "head_dim": int(hf.get("head_dim") or int(hf["hidden_size"]) // heads),
        "vocab_size": int(hf["vocab_size"]),
        "norm_eps": float(hf.get("rms_norm_eps", 1e-6)),
        "tied_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "qkv_bias": bool(hf.get("attention_bias", False)),
        "out_bias": bool(hf.get("attention_bias", False)),
        "max_length": max_length,
    }
    if fields["head_dim"] % 2:
        raise UserError(
            f"config.json makes heads of {fields['head_dim']} features, which do not pair up to be rotated: correct "
            "head_dim, or hidden_size and num_attention_heads."
        )
    return DecoderConfig(**{**fields, **more})
