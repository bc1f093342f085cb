"""The families with a mixture of experts in the place of the MLP: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, GLM-4-MoE and
MiniMax-M2.

Checkpoints have each expert's matrices apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.errors import UserError
from engine.experts.layers.routed_experts import RoutedSizes
from engine.experts.ops.routing import RoutingRule
from engine.models.decoder_config import DecoderConfig
from engine.models.families.family import Family
from engine.models.families.reading import (
    PRE_NORM_MODULES,
    check_activation,
    check_required,
    decoder_config,
    rotating_part,
    windows_from_hf,
)
from engine.models.layer_records import LayerKind
from engine.models.names import CORRECTION, NameMap
from engine.sentences import as_written

_LINEARS = ("gate_proj", "up_proj", "down_proj")
MIXTRAL_NAMES = NameMap(
    layer_modules={
        **{name: place for name, place in PRE_NORM_MODULES.items() if not name.startswith("mlp.")},
        "mlp.router": "block_sparse_moe.gate",
        "mlp.experts.*.gate_proj": "block_sparse_moe.experts.*.w1",
        "mlp.experts.*.up_proj": "block_sparse_moe.experts.*.w3",
        "mlp.experts.*.down_proj": "block_sparse_moe.experts.*.w2",
    }
)
NAMES = NameMap(
    layer_modules={
        **PRE_NORM_MODULES,
        "mlp.router": "mlp.gate",
        **{f"mlp.experts.*.{name}": f"mlp.experts.*.{name}" for name in _LINEARS},
        **{f"mlp.shared_expert.{name}": f"mlp.shared_expert.{name}" for name in _LINEARS},
        "mlp.shared_expert_gate": "mlp.shared_expert_gate",
    }
)
MINIMAX_NAMES = replace(MIXTRAL_NAMES, tensors={f"mlp.router.{CORRECTION}": f"block_sparse_moe.{CORRECTION}"})
GLM4_NAMES = NameMap(
    layer_modules={
        **{name: place for name, place in NAMES.layer_modules.items() if "shared_expert" not in name},
        **{f"mlp.shared_expert.{name}": f"mlp.shared_experts.{name}" for name in _LINEARS},
    }
)

_MIXTRAL = {
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "num_experts_per_tok": 2,
    "rope_theta": 1e6, "router_aux_loss_coef": 0.001,
}  # fmt: skip
_QWEN2 = {
    "num_key_value_heads": 16, "sliding_window": 4096, "max_window_layers": 28, "qkv_bias": True,
    "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    "router_aux_loss_coef": 0.001,
}  # fmt: skip
_QWEN3 = {
    "num_key_value_heads": 4, "sliding_window": 4096, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "router_aux_loss_coef": 0.001,
}  # fmt: skip
_OLMOE = {"rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.01}
_GLM4 = {
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "moe_intermediate_size": 1408,
    "n_shared_experts": 1, "n_routed_experts": 128, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "use_qk_norm": False, "num_nextn_predict_layers": 1,
}  # fmt: skip
_MINIMAX_M2 = {
    "num_key_value_heads": 8, "head_dim": 128, "num_experts_per_tok": 8, "max_position_embeddings": 196608,
    "rope_theta": 5e6, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
}  # fmt: skip


def read_routed(
    hf: Mapping[str, Any], defaults: Mapping[str, Any], unsupported: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Returns the config with its family's defaults.

    Raises:
        UserError: it lacks a size, or asks for what the decoder does not have.
    """
    check_required(hf, str(hf.get("model_type")))
    check_activation(hf, "hidden_act", "silu")
    for key in unsupported:
        if hf.get(key):
            without = "null" if key == "clip_qkv" else "0"
            raise UserError(
                f"config.json has {key} {hf[key]}, but that is not computed here: set it to {without}, if the model "
                "may do without."
            )
    # no window is a value of its own, of other keys null is no value
    return {**defaults, **{key: value for key, value in hf.items() if value is not None or key == "sliding_window"}}


def routed_sizes(
    hf: Mapping[str, Any],
    *,
    usual: int,
    intermediate: int,
    renormalises: bool,
    rounds: bool,
    rule: Mapping[str, Any] | None = None,
    **more: Any,
) -> RoutedSizes:
    """Returns the mixture's sizes.

    Args:
        hf: the config, which has the number of experts under one of three names.
        usual: that number, where the config has none of them.
        intermediate, more: as of `RoutedSizes`.
        renormalises, rounds, rule: as of its rule.

    Raises:
        UserError: a token is to have more experts than there are.
    """
    per_token, num_experts = int(hf["num_experts_per_tok"]), _num_experts(hf, usual)
    if not 1 <= per_token <= num_experts:
        raise UserError(
            f"config.json has num_experts_per_tok {per_token} and {num_experts} experts, but each token needs one or "
            "more, and no more than there are: correct it or copy it again."
        )
    if intermediate < 1:
        raise UserError("config.json gives experts no inner features: correct their intermediate size.")
    found = RoutingRule(
        num_experts=num_experts, per_token=per_token, renormalises=renormalises, rounds=rounds, **(rule or {})
    )
    return RoutedSizes(rule=found, intermediate=intermediate, **more)


def _num_experts(hf: Mapping[str, Any], usual: int) -> int:
    given = (hf[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if hf.get(key) is not None)
    return int(next(given, usual))


def requested_balance(hf: Mapping[str, Any]) -> float:
    """Returns the coefficient of the auxiliary loss that transformers would add to the loss of this model."""
    return float(hf["router_aux_loss_coef"]) if hf.get("output_router_logits") else 0.0


def compared_by_group(hf: Mapping[str, Any], usual: int) -> dict[str, Any]:
    """Returns what is DeepSeek-V3's own of the rule of a router, which others have taken over.

    Args:
        hf, usual: as of `routed_sizes`.

    Raises:
        UserError: experts do not make such groups, or tokens cannot choose as many experts as they are to have.
    """
    num_experts, groups, kept = _num_experts(hf, usual), int(hf["n_group"]), int(hf["topk_group"])
    if groups > 1 and (num_experts % groups or num_experts // groups < 2):
        raise UserError(
            f"config.json has {num_experts} experts and n_group {groups}, but groups have equally many "
            "experts, and two or more: correct it or copy it again."
        )
    if kept > groups or kept * (num_experts // groups) < int(hf["num_experts_per_tok"]):
        raise UserError(
            f"config.json has topk_group {kept} of {groups} groups of {num_experts // groups} experts, but "
            f"num_experts_per_tok {hf['num_experts_per_tok']}: correct it or copy it again."
        )
    return {
        "scores": "sigmoid", "num_groups": groups, "kept_groups": kept, "has_correction": True, "wide": True,
        "factor": float(hf["routed_scaling_factor"]),
    }  # fmt: skip


def later_tokens(hf: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns patterns of the tensors of layers that predict tokens after the next one, which follow the others."""
    layers, more = int(hf.get("num_hidden_layers") or 0), int(hf.get("num_nextn_predict_layers") or 0)
    return tuple(f"model.layers.{index}.*" for index in range(layers, layers + more))


def qwen_sizes(hf: Mapping[str, Any], *, usual: int, **more: Any) -> RoutedSizes:
    """Returns the sizes of a Qwen mixture, in which some layers may have an MLP."""
    step, alone = int(hf.get("decoder_sparse_step") or 1), set(hf.get("mlp_only_layers") or ())
    layers = range(int(hf.get("num_hidden_layers") or 0))
    return routed_sizes(
        hf,
        usual=usual,
        intermediate=int(hf["moe_intermediate_size"]),
        renormalises=bool(hf.get("norm_topk_prob", False)),
        rounds=True,
        dense_layers=tuple(index for index in layers if index in alone or (index + 1) % step),
        balanced_by=requested_balance(hf),
        **more,
    )


def _every_window(hf: Mapping[str, Any]) -> tuple[LayerKind, ...]:
    if hf.get("sliding_window") is None:
        return ()
    return windows_from_hf(hf, ["sliding_attention"] * int(hf.get("num_hidden_layers") or 0))


def mixtral(hf: dict[str, Any]) -> DecoderConfig:
    """Reads a Mixtral `config.json`.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    hf = read_routed(hf, _MIXTRAL, ("router_jitter_noise",))
    sizes = routed_sizes(
        hf,
        usual=8,
        intermediate=int(hf.get("intermediate_size") or 1),
        renormalises=True,
        rounds=False,
        balanced_by=requested_balance(hf),
    )
    return decoder_config(
        hf, "mixtral", qkv_bias=False, out_bias=False, layer_kinds=_every_window(hf), variants=(sizes,)
    )


def qwen2_moe(hf: dict[str, Any]) -> DecoderConfig:
    """Reads a Qwen2-MoE `config.json`: its lower layers may have a window, every other one.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    hf = read_routed(hf, _QWEN2)
    kinds: tuple[LayerKind, ...] = ()
    if hf.get("use_sliding_window", False):
        below = int(hf["max_window_layers"])
        types = [
            "sliding_attention" if index % 2 == 0 and index < below else "full_attention"
            for index in range(int(hf.get("num_hidden_layers") or 0))
        ]
        kinds = windows_from_hf(hf, types)
    sizes = qwen_sizes(hf, usual=60, shared=int(hf["shared_expert_intermediate_size"]))
    return decoder_config(
        hf, "qwen2_moe", qkv_bias=bool(hf["qkv_bias"]), out_bias=False, layer_kinds=kinds, variants=(sizes,)
    )


def qwen3_moe(hf: dict[str, Any]) -> DecoderConfig:
    """Reads a Qwen3-MoE `config.json`.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    hf = read_routed(hf, _QWEN3)
    kinds = _every_window(hf) if hf.get("use_sliding_window", False) else ()
    return decoder_config(hf, "qwen3_moe", qk_norm=True, layer_kinds=kinds, variants=(qwen_sizes(hf, usual=128),))


def olmoe(hf: dict[str, Any]) -> DecoderConfig:
    """Reads an OLMoE `config.json`: queries and keys are normalised over all heads.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    hf = read_routed(hf, _OLMOE, ("clip_qkv",))
    sizes = routed_sizes(
        hf,
        usual=64,
        intermediate=int(hf.get("intermediate_size") or 1),
        renormalises=bool(hf.get("norm_topk_prob", False)),
        rounds=True,
        balanced_by=requested_balance(hf),
    )
    return decoder_config(hf, "olmoe", qk_norm=True, qk_norm_over="all", variants=(sizes,))


def balanced_sizes(hf: dict[str, Any], *, usual: int) -> RoutedSizes:
    """Reads DeepSeek-V3's mixture: sigmoids compared with corrections and by groups, shared experts that all tokens
    have, and the first layers dense, or those that are listed.

    Args:
        usual: number of experts where the config does not say.

    Raises:
        UserError: the list does not fit the layers; see also `routed_sizes` and `compared_by_group`.
    """
    intermediate = int(hf["moe_intermediate_size"])
    return routed_sizes(
        hf,
        usual=usual,
        intermediate=intermediate,
        renormalises=bool(hf["norm_topk_prob"]),
        rounds=False,
        rule=compared_by_group(hf, usual),
        shared=int(hf["n_shared_experts"]) * intermediate,
        gates_shared=False,
        dense_layers=_dense_layers(hf),
    )


def _dense_layers(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the layers with a dense MLP: those that `mlp_layer_types` lists, else the first ones."""
    types = hf.get("mlp_layer_types")
    if types is None:
        return tuple(range(int(hf["first_k_dense_replace"])))
    if strange := sorted(set(types) - {"dense", "sparse"}):
        raise UserError(
            f"config.json has mlp_layer_types with {as_written(strange[0])}, but layers are dense or sparse: correct "
            "it or copy it again."
        )
    if len(types) != hf["num_hidden_layers"]:
        raise UserError(
            f"config.json has {len(types)} mlp_layer_types for {hf['num_hidden_layers']} layers: expected one for "
            "each, correct it."
        )
    return tuple(index for index, kind in enumerate(types) if kind == "dense")


def glm4_moe(hf: dict[str, Any]) -> DecoderConfig:
    """Reads a GLM-4-MoE `config.json`: DeepSeek-V3's router, half of each head rotated, and the first layers dense.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    hf = read_routed(hf, _GLM4)
    sizes = balanced_sizes(hf, usual=128)
    config = decoder_config(hf, "glm4_moe", qk_norm=bool(hf["use_qk_norm"]), out_bias=False, variants=(sizes,))
    return rotating_part(config, hf, usual=0.5)


def minimax_m2(hf: dict[str, Any]) -> DecoderConfig:
    """Reads a MiniMax-M2 `config.json`: queries and keys are normalised over all heads, a part of each head is rotated,
    and routers compare sigmoids with a correction.

    Layers that predict later tokens, which released configs count, are not in released checkpoints.

    Raises:
        UserError: a required key is missing, or the model uses something that the decoder does not have.
    """
    hf = read_routed(hf, _MINIMAX_M2, ("router_jitter_noise", "output_router_logits"))
    sizes = routed_sizes(
        hf,
        usual=256,
        intermediate=int(hf.get("intermediate_size") or 1),
        renormalises=True,
        rounds=False,
        rule={**compared_by_group(hf, 256), "wide": False},
    )
    config = decoder_config(
        hf, "minimax_m2", qk_norm=True, qk_norm_over="all", qkv_bias=False, out_bias=False, variants=(sizes,)
    )
    rotated = hf.get("rotary_dim")
    return rotating_part(config, hf, usual=1.0 if rotated is None else int(rotated) / config.head_dim)


GLM4_MOE = Family(glm4_moe, GLM4_NAMES, unused=later_tokens)
MINIMAX_M2 = Family(minimax_m2, MINIMAX_NAMES)
MIXTRAL = Family(mixtral, MIXTRAL_NAMES)
OLMOE = Family(olmoe, NAMES)
QWEN2_MOE = Family(qwen2_moe, NAMES)
QWEN3_MOE = Family(qwen3_moe, NAMES)
