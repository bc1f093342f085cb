"""Qwen3-Next and the language models of Qwen3.5: three layers with a gated delta net to each one with gated attention,
an MLP or experts in each; norms are scaled by 1 + weight, and a quarter of each head is rotated.

They differ in how checkpoints have the rows of a delta net's first linears. Layers that predict later tokens are passed
by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.errors import UserError
from engine.experts.families.routed import NAMES as ROUTED_NAMES
from engine.experts.families.routed import qwen_sizes, read_routed
from engine.hybrids.layers.gated_attention import GatedHeads
from engine.hybrids.layers.gated_delta_net import NAME, DeltaSizes
from engine.models.decoder_config import DecoderConfig, LayerVariant
from engine.models.families.family import Family
from engine.models.families.reading import (
    NAMES,
    axes_in_turns,
    check_activation,
    check_layer_types,
    check_required,
    checked_sections,
    decoder_config,
    filled,
    rotating_part,
)
from engine.models.names import NameMap

_MIXER = ("conv1d", "A_log", "dt_bias", "norm", "out_proj")
_PARAMETERS = (f"{NAME}.A_log", f"{NAME}.dt_bias")


_APART = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


def _names(plain: NameMap, *linears: str) -> NameMap:
    """Returns the map of a family whose other modules are named so."""
    mixer = {f"{NAME}.{name}": f"linear_attn.{name}" for name in (*linears, *_MIXER)}
    return NameMap(layer_modules={**plain.layer_modules, **mixer}, parameters=_PARAMETERS)


_MIXER_SIZES = {
    "head_dim": 256, "max_position_embeddings": 32768, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
_NEXT = {
    **_MIXER_SIZES, "num_key_value_heads": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10, "norm_topk_prob": True, "router_aux_loss_coef": 0.001,
}  # fmt: skip
_DENSE = {**_MIXER_SIZES, "num_key_value_heads": 4}
_MOE = {
    **_MIXER_SIZES, "num_key_value_heads": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8, "router_aux_loss_coef": 0.001, "norm_topk_prob": True,
}  # fmt: skip
_MROPE_SECTION = [11, 11, 10]


def later_tokens(hf: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns patterns of the tensors of layers that predict tokens after the next one."""
    return ("mtp.*", "model.mtp.*")


def qwen3_next(hf: dict[str, Any]) -> DecoderConfig:
    """Reads a Qwen3-Next `config.json`.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    hf = read_routed(hf, _NEXT)
    sizes = qwen_sizes(hf, usual=512, shared=int(hf["shared_expert_intermediate_size"]))
    return _decoder(hf, "qwen3_next", "by head", (sizes,))


def qwen3_5(hf: dict[str, Any]) -> DecoderConfig:
    """Reads the language model of Qwen3.5.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    check_required(hf, "qwen3_5_text")
    check_activation(hf, "hidden_act", "silu")
    hf = filled(hf, _DENSE)
    return _turned_by_axes(_decoder(hf, "qwen3_5_text", "apart", ()), hf)


def qwen3_5_moe(hf: dict[str, Any]) -> DecoderConfig:
    """Reads the language model of Qwen3.5 with experts.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    if hf.get("intermediate_size") is None:  # no layer has a plain MLP
        hf = {**hf, "intermediate_size": hf.get("moe_intermediate_size") or _MOE["moe_intermediate_size"]}
    hf = read_routed(hf, _MOE)
    sizes = qwen_sizes(hf, usual=256, shared=int(hf["shared_expert_intermediate_size"]))
    return _turned_by_axes(_decoder(hf, "qwen3_5_moe_text", "apart", (sizes,)), hf)


def _decoder(hf: dict[str, Any], family: str, stored: Any, more: tuple[LayerVariant, ...]) -> DecoderConfig:
    kinds = _layer_types(hf)
    sizes = DeltaSizes(
        layers=tuple(index for index, kind in enumerate(kinds) if kind == "linear_attention"),
        key_heads=int(hf["linear_num_key_heads"]),
        value_heads=int(hf["linear_num_value_heads"]),
        key_dim=int(hf["linear_key_head_dim"]),
        value_dim=int(hf["linear_value_head_dim"]),
        taps=int(hf["linear_conv_kernel_dim"]),
        stored=stored,
    )
    if sizes.value_heads % sizes.key_heads:
        raise UserError(
            f"config.json has {sizes.value_heads} value heads and {sizes.key_heads} key heads of linear attention, but "
            "each key head serves as many value heads: correct it or copy it again."
        )
    gated = GatedHeads(layers=tuple(index for index, kind in enumerate(kinds) if kind == "full_attention"))
    config = decoder_config(hf, family, qk_norm=True, norm_offset=1.0, variants=(sizes, gated, *more))
    return rotating_part(config, hf, usual=0.25)


def _layer_types(hf: Mapping[str, Any]) -> list[str]:
    """Returns the type of each layer."""
    count, step = int(hf["num_hidden_layers"]), int(hf.get("full_attention_interval") or 4)
    types = hf.get("layer_types") or [
        "linear_attention" if (index + 1) % step else "full_attention" for index in range(count)
    ]
    check_layer_types(hf, types, ("linear_attention", "full_attention"))
    return list(types)


def _turned_by_axes(config: DecoderConfig, hf: Mapping[str, Any]) -> DecoderConfig:
    """Returns the config whose rotary embedding turns tokens of images by time, height and width, in turns."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    sections = checked_sections(rope.get("mrope_section") or _MROPE_SECTION)
    axes = axes_in_turns((config.rotary_dim or config.head_dim) // 2, sections)
    return replace(config, ropes=(replace(config.ropes[0], axes=axes),))


QWEN3_NEXT = Family(qwen3_next, _names(ROUTED_NAMES, "in_proj_qkvz", "in_proj_ba"), unused=later_tokens)
QWEN3_5_TEXT = Family(qwen3_5, _names(NAMES, *_APART), unused=later_tokens)
QWEN3_5_MOE_TEXT = Family(qwen3_5_moe, _names(ROUTED_NAMES, *_APART), unused=later_tokens)
